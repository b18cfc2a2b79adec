"""Answers a session's model calls from a recording, for as long as it asks what was recorded.

A request is found by what it asks, token for token, and not by its place: sub-agents, side calls and retries
may come in another order. One that differs only in clock times and measured durations is asked in the
recorded words: if that is the recorded request, the recorded messages stand for its own from then on, and
what the policy is shown stays exactly what it was. Any other difference is a divergence.
"""

from __future__ import annotations

import asyncio
import difflib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
import orjson

from polar.errors import PolarError
from polar.gateway.canonical import variations
from polar.gateway.conversation import Extension
from polar.models.chat import ChatRequest, FinishReason, Message
from polar.models.completion import (
    CHOICE,
    CONSTRAINT,
    DIVERGED,
    HARNESS_VERSION,
    NO_IDS,
    REPLAYED,
    RESUMED,
    SUPERSEDED,
    Completion,
    Ids,
)
from polar.models.session import (
    LONGEST_DIFFERENCE,
    LONGEST_VARIATION,
    MOST_DIVERGENCES,
    MOST_VARIATIONS,
    Divergence,
    Origin,
    ReplayReport,
)
from polar.models.task import BudgetScope, OnDivergence
from polar.recordings.tree import TokenTree

if TYPE_CHECKING:
    from polar.gateway.source import AnswerGeneration, Prompt

ANOTHER_REQUEST = "it is the recorded answer to another request"
_AGAIN = "-again"
"""Ends the id of an answer that was given for another request."""
_Begin = Callable[[ChatRequest, Extension], Awaitable["AnswerGeneration"]]
"""Renders a request."""
_Lines = list[tuple[str, str]]
"""Recorded lines and those that were sent instead."""
_TAIL = 256
"""Tokens at a prompt's end by which it is looked up, so that its length does not matter."""
_MOST_LINES, _LONGEST_LINE = 200, 500
"""How much of two requests is compared, from where they first differ."""


class ReplayEnded(PolarError):
    """The agent is to go no further: the recording is used up, or the agent has left it."""


@dataclass(frozen=True, slots=True)
class _Asked:
    request: ChatRequest
    constraint: str | None
    choice: int

    def as_in(self, completion: Completion) -> bool:
        """Whether as much was asked for there, and in the same form."""
        held_to = completion.extra.get(CONSTRAINT)
        return completion.asked == self.request.sampling and held_to == self.constraint


class Playback:
    """What is left of a recording to be asked for."""

    def __init__(
        self,
        tree: TokenTree,
        origin: Origin,
        session_id: str,
        *,
        is_whole: bool = True,
        earlier: TokenTree | None = None,
        harness_version: str | None = None,
    ) -> None:
        """`is_whole`: the recorded agent asked for nothing more, and ended by itself. `earlier`: what earlier
        attempts at this session captured, whose answers go before those of the recording. `harness_version`:
        which version asks now; that another one asked in them is a divergence."""
        self._origin = origin
        attempts = earlier.completions if earlier is not None else ()
        calls = len(tree.completions) if origin.calls is None else origin.calls
        shared, beyond = tree.completions[:calls], tree.completions[calls:]
        self._is_whole = is_whole
        self._ends_agent = is_whole and not beyond and not origin.samples_on
        self._why_over = (
            f"the first {calls} model calls were replayed" if beyond else "the recording ends here"
        )
        recorded = {it.id for it in tree.completions}
        again = [it.id for it in attempts if it.id.endswith(_AGAIN) and it.id not in recorded]
        self._stands_for = {id: id.removesuffix(_AGAIN) for id in again}
        """Completion of this session that was given for another request → the recorded one."""
        had = {it.id for it in attempts}.union(self._stands_for.values())
        answers = [*attempts, *(it for it in shared if it.id not in had)]
        self._attempts, self._end = len(attempts), len(answers)
        answers += beyond
        self._is_left = False
        """Whether the model has answered what is not in the recording, and answers from then on."""
        self._own = {it.id: it for it in attempts if REPLAYED not in it.extra}
        """What earlier attempts sampled."""
        self._unused = {place: it for place, it in enumerate(answers) if _is_answer(it)}
        self._by_prompt: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        self._by_turn: dict[str | None, list[int]] = defaultdict(list)
        for place, completion in self._unused.items():
            self._by_prompt[_ending(completion.prompt_ids)].append(place)
            self._by_turn[completion.follows].append(place)
        self._recorded = {it.id for it in answers} - self._own.keys()
        self._noted: dict[int, Divergence] = {}
        self._turn = asyncio.Lock()
        """Requests come one after the other, so that none takes what another has found."""
        unused = sum(place < self._end for place in self._unused)
        begins_with = session_id if attempts else origin.session_id
        self.report = ReplayReport(origin=begins_with, unused_calls=unused)
        asked = dict.fromkeys(it.extra.get(HARNESS_VERSION) for it in attempts)
        for other in asked if harness_version is not None else ():
            if other not in (None, harness_version):
                told = f"Version {other} of the harness asked, and now version {harness_version} asks."
                self._diverge(Divergence(call=None, taken=OnDivergence.LIVE, difference=told))

    async def answer(
        self,
        request: ChatRequest,
        extension: Extension,
        generation: AnswerGeneration,
        begin: _Begin,
        *,
        call: int,
        choice: int = 0,
    ) -> Completion | None:
        """The recorded answer to a request, as it goes into the session's own capture; None: the model is to
        answer it.

        ReplayEnded if the agent is to go no further. `begin` renders a request as this one was for its
        generation. `call` and `choice` are the request's place among the session's calls and, where it asks
        for several answers, the place of this one among them.
        """
        follows = _followed(extension)
        is_of_origin = follows is None or follows in self._recorded or follows in self._stands_for
        if not is_of_origin and next(self._following(follows), None) is None:
            return None  # It continues what was sampled here.
        async with self._turn:
            prompt = generation.prompt(NO_IDS)
            asked = _Asked(request, generation.record.get(CONSTRAINT), choice)
            place, varied = self._exact(prompt, asked), dict[int, _Lines]()
            if place is None:
                place, varied = await self._alike(asked, extension, generation, begin)
            if place is None:
                return await self._unrecorded(asked, extension, prompt, call)
            if place >= self._end:
                del self._unused[place]
                self._go_on()
                return None
            if follows in self._stands_for and self._unused[place].follows != follows:
                return self._given_for_another(place, prompt, follows, call)
            self._note(varied)
            completion = self._take(place)
            return replace(completion, extra=self._extra_of(place, completion))

    async def _unrecorded(
        self, asked: _Asked, extension: Extension, prompt: Prompt, call: int
    ) -> Completion | None:
        follows = _followed(extension)
        place = self._nearest(follows)
        if place is None and (not self._ends_agent or self._is_left):
            self._go_on()
            return None
        # Where an earlier attempt had left the recording, the model answered.
        is_own = place is not None and self._unused[place].id in self._own
        taken, difference = OnDivergence.LIVE if is_own else self._origin.on_divergence, ""
        if len(self.report.divergences) < MOST_DIVERGENCES:
            recorded = self._unused[place] if place is not None else None
            difference = await asyncio.to_thread(_difference, recorded, asked, len(extension.new_messages))
        self._noted[call] = Divergence(call=call, taken=taken, difference=difference)
        self._diverge(self._noted[call])
        match taken:
            case OnDivergence.STOP:
                raise ReplayEnded(f"model call {call + 1} is not the recorded one")
            case OnDivergence.RECORDED if place is not None:
                return self._given_for_another(place, prompt, follows, call)
            case OnDivergence.LIVE:
                self._is_left = True
        self._go_on()
        return None

    def _go_on(self) -> None:
        """Leave a request to the model, or end the agent where it is only replayed."""
        if not self._origin.samples_on and not self._is_left:
            raise ReplayEnded(self._why_over)
        self._is_left = True

    def _exact(self, prompt: Prompt, asked: _Asked) -> int | None:
        """The recorded completion with this very prompt: of several, the one that is the same choice."""
        if not len(prompt.ids):
            return None
        same = [
            place
            for place in self._by_prompt.get(_ending(prompt.ids), ())
            if place in self._unused
            and asked.as_in(self._unused[place])
            and np.array_equal(self._unused[place].prompt_ids, prompt.ids)
        ]
        return min(same, key=lambda at: (_choice_of(self._unused[at]) != asked.choice, at), default=None)

    async def _alike(
        self, asked: _Asked, extension: Extension, generation: AnswerGeneration, begin: _Begin
    ) -> tuple[int | None, dict[int, _Lines]]:
        """A recorded completion that continues the same turn and has the request's prompt once its messages
        are in the recorded words, and what varied, by message: of several, the one that varies least."""
        follows = _followed(extension)
        if asked.request.raw is not None:
            return None, {}
        left = [(place, it) for place, it in self._following(follows) if asked.as_in(it)]
        is_exact = len(generation.prompt(NO_IDS).ids) > 0 and follows not in self._stands_for
        for place, varied in await asyncio.to_thread(_alike, left, asked, extension) if left else ():
            if not is_exact or (varied and await self._is_asked(place, varied, asked, extension, begin)):
                return place, varied
        return None, {}

    async def _is_asked(
        self, place: int, varied: dict[int, _Lines], asked: _Asked, extension: Extension, begin: _Begin
    ) -> bool:
        """Whether the request, in the recorded words, is the recorded one."""
        recorded, said = self._unused[place], list(extension.messages)
        for at in varied:
            said[at] = replace(said[at], content=recorded.messages[at - len(said)].content)
        first = len(said) - len(extension.new_messages)
        worded = replace(extension, messages=tuple(said), new_messages=tuple(said[first:]))
        rendered = await begin(replace(asked.request, messages=worded.messages), worded)
        return np.array_equal(rendered.prompt(NO_IDS).ids, recorded.prompt_ids)

    def _following(self, follows: str | None) -> Iterator[tuple[int, Completion]]:
        """What is left of the recording that continues a turn."""
        turn = self._stands_for.get(follows, follows) if follows is not None else None
        return ((at, self._unused[at]) for at in self._by_turn.get(turn, ()) if at in self._unused)

    def _left(self) -> Iterator[int]:
        return (place for place in self._unused if place < self._end)

    def _nearest(self, follows: str | None) -> int | None:
        """The recorded completion that was to be asked for now, as far as can be told; None: the request is
        beyond what is replayed."""
        if not self._is_whole and follows is not None and self._is_last_recorded(follows):
            return None  # The agent was broken off here, while others may still be given their answers.
        same_turn = [place for place, _ in self._following(follows)]
        place = next((place for place in same_turn if place < self._end), None)
        if self._is_left and follows is None:
            return None
        return place if same_turn or self._is_left else next(self._left(), None)

    def _is_last_recorded(self, turn: str) -> bool:
        """Whether nothing that was recorded continues a turn, used or not."""
        return self._stands_for.get(turn, turn) not in self._by_turn

    def _given_for_another(self, place: int, prompt: Prompt, follows: str | None, call: int) -> Completion:
        recorded = self._take(place)
        id = f"{recorded.id}{_AGAIN}"
        self._stands_for[id] = recorded.id
        return replace(
            recorded,
            id=id,
            prompt_ids=prompt.ids,
            messages=prompt.messages,
            follows=follows,
            parent=None,
            untrainable=ANOTHER_REQUEST,
            extra=self._extra_of(place, recorded) | self.note(call),
            routing=None,
        )

    def _extra_of(self, place: int, completion: Completion) -> dict[str, str]:
        """A completion that was replayed before keeps the session in which it was sampled; what attempts at
        that session came across says nothing of this one."""
        if place < self._attempts:
            return {**completion.extra, RESUMED: "yes"}
        kept = {name: said for name, said in completion.extra.items() if name not in (RESUMED, DIVERGED)}
        return {REPLAYED: self._origin.session_id, **kept}

    def is_free(self, completion: Completion) -> bool:
        """Whether budgets leave out an answer that was given: what earlier attempts sampled they count."""
        return REPLAYED in completion.extra and self._origin.budgets is BudgetScope.NEW

    def note(self, call: int) -> dict[str, str]:
        """What the record of a call's answer tells of its divergence, if it was one."""
        return {DIVERGED: self._noted[call].model_dump_json()} if call in self._noted else {}

    def superseded(self, recorded: Collection[str]) -> list[Completion]:
        """What earlier attempts sampled and is not among the completions that this one has recorded."""
        mark = {RESUMED: "yes", SUPERSEDED: "yes"}
        given = {id.removesuffix(_AGAIN) for id in recorded}.union(recorded)
        left = (it for id, it in self._own.items() if id not in given and it.sampled_tokens)
        return [replace(it, extra=it.extra | mark) for it in left]

    def _take(self, place: int) -> Completion:
        completion = self._unused.pop(place)
        self._is_left = self._is_left or completion.id in self._own
        if place < self._attempts and DIVERGED in completion.extra:
            self._diverge(Divergence.model_validate_json(completion.extra[DIVERGED]))
        report = self.report
        self._report(
            calls=report.calls + 1,
            sampled_tokens=report.sampled_tokens + completion.sampled_tokens,
            unused_calls=report.unused_calls - 1,
        )
        if not self.report.unused_calls:
            # What the model answers from now on needs nothing of the recording, which is large.
            for kept in (self._unused, self._by_prompt, self._by_turn):
                kept.clear()
        return completion

    def _note(self, varied: dict[int, _Lines]) -> None:
        count, told = self.report.varied_messages, self.report.variations
        lines = (f"{was.strip()} → {now.strip()}" for was, now in chain.from_iterable(varied.values()))
        new = (line[:LONGEST_VARIATION] for line in islice(lines, MOST_VARIATIONS - len(told)))
        self._report(varied_messages=count + len(varied), variations=(*told, *new))

    def _diverge(self, divergence: Divergence) -> None:
        described = self.report.divergences
        if len(described) < MOST_DIVERGENCES:
            described += (divergence,)
        self._report(divergences=described, divergence_count=self.report.divergence_count + 1)

    def _report(self, **changes: object) -> None:
        self.report = self.report.model_copy(update=changes)


def _is_answer(completion: Completion) -> bool:
    """Whether the recorded agent was given this answer whole."""
    is_whole = completion.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
    return is_whole and SUPERSEDED not in completion.extra


def _followed(extension: Extension) -> str | None:
    return extension.follows.completion_id if extension.follows is not None else None


def _ending(ids: Ids) -> tuple[int, bytes]:
    return len(ids), np.ascontiguousarray(ids[-_TAIL:], np.int32).tobytes()


def _choice_of(completion: Completion) -> int:
    return int(completion.extra.get(CHOICE, "0"))


def _alike(
    left: Sequence[tuple[int, Completion]], asked: _Asked, extension: Extension
) -> list[tuple[int, dict[int, _Lines]]]:
    """Those whose last messages are the request's but for what varies, with that, by message."""
    said, sent = extension.new_messages, len(extension.messages)
    before = len(extension.turn.messages) if extension.turn is not None else 0
    # A client may send in parts what was sampled whole.
    lengths = {before + len(said), sent}
    found = []
    for place, completion in left:
        if len(completion.messages) in lengths and completion.tools == asked.request.tools:
            recorded = completion.messages[len(completion.messages) - len(said) :]
            varied = _varied(recorded, said, sent - len(said))
            if varied is not None:
                found.append((len(varied), _choice_of(completion) != asked.choice, place, varied))
    return [(place, varied) for *_, place, varied in sorted(found, key=itemgetter(0, 1, 2))]


def _varied(recorded: Sequence[Message], said: Sequence[Message], first: int) -> dict[int, _Lines] | None:
    varied = {}
    for at, (one, other) in enumerate(zip(recorded, said, strict=True), first):
        lines = variations(one, other)
        if lines is None:
            return None
        if lines:
            varied[at] = lines
    return varied


def _difference(recorded: Completion | None, asked: _Asked, last: int) -> str:
    """How a request differs from the recorded one; of its own messages only the `last` can."""
    if recorded is None:
        return "The recorded agent asked for nothing more."
    request = asked.request
    shared = max(len(request.messages) - last, 0)
    old, new = (_lines(messages[shared:]) for messages in (recorded.messages, request.messages))
    for was, now in (
        (recorded.asked, request.sampling),
        (recorded.extra.get(CONSTRAINT), asked.constraint),
        (recorded.tools, request.tools),
    ):
        if was != now:
            old += _parts(orjson.dumps(was).decode())
            new += _parts(orjson.dumps(now).decode())
    differs = (at for at, (was, now) in enumerate(zip_longest(old, new)) if was != now)
    start = max(next(differs, 0) - 2, 0)
    old, new = old[start : start + _MOST_LINES], new[start : start + _MOST_LINES]
    lines = difflib.unified_diff(old, new, "recorded", "asked", n=2, lineterm="")
    told = "\n".join(lines)[:LONGEST_DIFFERENCE]
    return told or "The messages are the recorded ones, and make another prompt."


def _lines(messages: Sequence[Message]) -> list[str]:
    shown = (line for it in messages for line in (f"[{it.role}]", *_shown(it).split("\n")))
    return list(chain.from_iterable(map(_parts, shown)))


def _parts(line: str) -> list[str]:
    return [line[at : at + _LONGEST_LINE] for at in range(0, max(len(line), 1), _LONGEST_LINE)]


def _shown(message: Message) -> str:
    calls = (f"{call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join([message.content, *calls])
