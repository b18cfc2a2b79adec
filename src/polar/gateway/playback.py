"""Answers a session's model calls from a recording, for as long as it asks what was recorded.

A request is found by what it asks, token for token, and not by its place: sub-agents, side calls and retries
may come in another order. One that differs only in what no two runs have in common, such as a duration in a
tool's output, is taken for the recorded one, and the recorded messages stand for its own: what the policy is
shown stays exactly what it was. Any other difference is a divergence.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from polar.errors import PolarError
from polar.gateway.canonical import alike, key_of
from polar.gateway.conversation import Extension
from polar.models.chat import ChatRequest, FinishReason, Message
from polar.models.completion import CHOICE, REPLAYED, RESUMED, Completion, Ids
from polar.models.session import (
    LONGEST_DIFFERENCE,
    MOST_DIVERGENCES,
    Divergence,
    Origin,
    ReplayReport,
)
from polar.models.task import OnDivergence
from polar.recordings.tree import TokenTree

if TYPE_CHECKING:
    from polar.gateway.source import Prompt

ANOTHER_REQUEST = "it is the recorded answer to another request"
_Pair = tuple[Message, Message]
"""A recorded message and the one that was sent."""
_COMPARED = 65_536
"""Characters of each request that are compared line by line."""


class ReplayEnded(PolarError):
    """The agent is to go no further: the recording is used up, or the agent has left it."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedAnswer:
    """A recorded answer that is given again."""

    completion: Completion
    """What goes into the session's own capture."""
    said: tuple[Message, ...] = ()
    """The request's last messages, where recorded ones stand for them."""


class Playback:
    """What is left of a recording to be asked for."""

    def __init__(self, tree: TokenTree, origin: Origin, session_id: str, *, is_whole: bool = True) -> None:
        """`is_whole`: the recorded agent asked for nothing more, and ended by itself."""
        self._origin = origin
        count = len(tree.completions)
        self._end = count if origin.calls is None else min(origin.calls, count)
        self._ends_agent = is_whole and self._end == count and not origin.samples_on
        self._is_left = False
        """Whether the model has answered what is not in the recording, and answers from then on."""
        self._mark = {RESUMED: "yes"} if origin.session_id == session_id else {REPLAYED: origin.session_id}
        """A completion that was replayed before keeps the session in which it was sampled; whether an earlier
        attempt at that session sampled it says nothing of this one."""
        self._unused = {place: it for place, it in enumerate(tree.completions) if _is_answer(it)}
        self._by_prompt: dict[tuple[int, int], list[int]] = {}
        for place, completion in self._unused.items():
            self._by_prompt.setdefault(_checksum(completion.prompt_ids), []).append(place)
        self._recorded = {it.id for it in tree.completions}
        self._stands_for: dict[str, str] = {}
        """Completion of this session that was given for another request → the recorded one."""
        self.report = ReplayReport(origin=origin.session_id, unused_calls=sum(1 for _ in self._left()))

    def answer(
        self, request: ChatRequest, extension: Extension, prompt: Prompt, *, call: int, choice: int = 0
    ) -> ReplayedAnswer | None:
        """The recorded answer to a request; None: the model is to answer it.

        ReplayEnded if the agent is to go no further. `call` and `choice` are the request's place among the
        session's calls and, where it asks for several answers, the place of this one among them.
        """
        follows = _followed(extension)
        said = extension.new_messages if extension.turn is not None else request.messages
        place = self._exact(prompt, choice)
        varied = 0
        if place is None and (found := self._alike(extension, said, request, choice)):
            place, differ = found
            varied = max(differ, 1) if len(prompt.ids) else differ
        if place is not None and place >= self._end:
            del self._unused[place]
            self._go_on(f"the first {self._end} model calls were replayed")
            return None
        if place is not None and follows in self._stands_for:
            return self._given_for_another(place, prompt, follows)
        if place is not None:
            return self._given(place, said if varied else (), varied)
        if follows is not None and follows not in self._recorded and follows not in self._stands_for:
            return None  # It continues what was sampled here.
        return self._unrecorded(request, follows, said, prompt, call)

    def _unrecorded(
        self, request: ChatRequest, follows: str | None, said: Sequence[Message], prompt: Prompt, call: int
    ) -> ReplayedAnswer | None:
        place = self._nearest(follows)
        if place is None and (not self._ends_agent or self._is_left):
            self._go_on("the recording ends here")
            return None
        recorded = self._unused[place].messages if place is not None else ()
        self._diverge(call, _difference(recorded, request.messages, len(said)))
        match self._origin.on_divergence:
            case OnDivergence.STOP:
                raise ReplayEnded(f"model call {call + 1} is not the recorded one")
            case OnDivergence.RECORDED if place is not None:
                return self._given_for_another(place, prompt, follows)
            case OnDivergence.LIVE:
                self._is_left = True
        self._go_on("the recording ends here")
        return None

    def _go_on(self, why: str) -> None:
        """Leave a request to the model, or end the agent where it is only replayed."""
        if not self._origin.samples_on and not self._is_left:
            raise ReplayEnded(why)

    def _exact(self, prompt: Prompt, choice: int) -> int | None:
        """The recorded completion with this very prompt: of several, the one that is the same choice."""
        if not len(prompt.ids):
            return None
        same = [
            place
            for place in self._by_prompt.get(_checksum(prompt.ids), ())
            if place in self._unused and np.array_equal(self._unused[place].prompt_ids, prompt.ids)
        ]
        return min(same, key=lambda at: (_choice_of(self._unused[at]) != choice, at), default=None)

    def _alike(
        self, extension: Extension, said: Sequence[Message], request: ChatRequest, choice: int
    ) -> tuple[int, int] | None:
        """A recorded completion that continues the same turn with messages that mean the same, and how many
        of them are worded otherwise: of several, the one with the fewest."""
        if request.raw is not None:
            return None
        before = len(extension.turn.messages) if extension.turn is not None else 0
        # A client may send in parts what was sampled whole.
        lengths = {before + len(said), len(request.messages)}
        found: list[tuple[int, bool, int, list[_Pair]]] = []
        for place, completion in self._following(_followed(extension)):
            if len(completion.messages) in lengths and completion.tools == request.tools:
                differing = _differing(completion.messages[len(completion.messages) - len(said) :], said)
                found.append((len(differing), _choice_of(completion) != choice, place, differing))
        for count, _, place, differing in sorted(found, key=itemgetter(0, 1, 2)):
            if all(alike(one, other) for one, other in differing):
                return place, count
        return None

    def _following(self, follows: str | None) -> Iterator[tuple[int, Completion]]:
        """What is left of the recording that continues a turn."""
        turn = self._stands_for.get(follows, follows) if follows is not None else None
        return ((place, it) for place, it in self._unused.items() if it.follows == turn)

    def _left(self) -> Iterator[int]:
        return (place for place in self._unused if place < self._end)

    def _nearest(self, follows: str | None) -> int | None:
        """The recorded completion that was to be asked for now, as far as can be told."""
        same_turn = (place for place, _ in self._following(follows) if place < self._end)
        return next(same_turn, next(self._left(), None))

    def _given(self, place: int, said: tuple[Message, ...], varied: int) -> ReplayedAnswer:
        completion = self._take(place, varied)
        return ReplayedAnswer(replace(completion, extra=self._extra_of(completion)), said)

    def _given_for_another(self, place: int, prompt: Prompt, follows: str | None) -> ReplayedAnswer:
        recorded = self._take(place)
        id = f"{recorded.id}-again"
        self._stands_for[id] = recorded.id
        return ReplayedAnswer(
            replace(
                recorded,
                id=id,
                prompt_ids=prompt.ids,
                messages=prompt.messages,
                follows=follows,
                parent=None,
                untrainable=ANOTHER_REQUEST,
                extra=self._extra_of(recorded),
                routing=None,
            )
        )

    def _extra_of(self, completion: Completion) -> dict[str, str]:
        return self._mark | {name: said for name, said in completion.extra.items() if name != RESUMED}

    def _take(self, place: int, varied: int = 0) -> Completion:
        completion = self._unused.pop(place)
        report = self.report
        self.report = report.model_copy(
            update={
                "calls": report.calls + 1,
                "sampled_tokens": report.sampled_tokens + completion.sampled_tokens,
                "varied_messages": report.varied_messages + varied,
                "unused_calls": report.unused_calls - 1,
            }
        )
        return completion

    def _diverge(self, call: int, difference: str) -> None:
        described = self.report.divergences
        if len(described) < MOST_DIVERGENCES:
            taken = self._origin.on_divergence
            described += (Divergence(call=call, taken=taken, difference=difference),)
        count = self.report.divergence_count + 1
        self.report = self.report.model_copy(update={"divergences": described, "divergence_count": count})


def _is_answer(completion: Completion) -> bool:
    """Whether the recorded agent was given this answer whole."""
    return completion.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)


def _followed(extension: Extension) -> str | None:
    return extension.follows.completion_id if extension.follows is not None else None


def _checksum(ids: Ids) -> tuple[int, int]:
    return len(ids), zlib.crc32(np.ascontiguousarray(ids, np.int32).data)


def _choice_of(completion: Completion) -> int:
    return int(completion.extra.get(CHOICE, "0"))


def _differing(recorded: Sequence[Message], said: Sequence[Message]) -> list[_Pair]:
    """The messages that are not the same to the policy."""
    return [pair for pair in zip(recorded, said, strict=True) if key_of(pair[0]) != key_of(pair[1])]


def _difference(recorded: Sequence[Message], asked: Sequence[Message], last: int) -> str:
    """How a request differs from the recorded one; of its own messages only the `last` can."""
    if not recorded:
        return "The recorded agent asked for nothing more."
    shared = max(len(asked) - last, 0)
    old, new = (_lines(messages[shared:]) for messages in (recorded, asked))
    lines = difflib.unified_diff(old, new, "recorded", "asked", n=2, lineterm="")
    return "\n".join(lines)[:LONGEST_DIFFERENCE]


def _lines(messages: Sequence[Message]) -> list[str]:
    text = "\n".join(f"[{message.role}]\n{_shown(message)}" for message in messages)
    return text[-_COMPARED:].splitlines()


def _shown(message: Message) -> str:
    calls = (f"{call.name}({call.arguments})" for call in message.tool_calls)
    return "\n".join([message.content, *calls])
