"""Grows a session's token tree: what each completion extends is found and proved where its tokens are.

A completion is joined to another only where every token before the join is the same, so that no token ever
stands after tokens it was not sampled after. Who is named as its predecessor is a hint: the tokens are
compared, and where no hint holds, a checksum finds the longest context that the prompt begins with.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from polar.models.chat import FinishReason, Message
from polar.models.completion import Ids
from polar.recordings.tree import Continuation, Link

GENERATION_PROMPT = 16
"""Maximum tokens of the template's opening of a turn, before a sampled span. Some templates open generated
turns differently from past ones."""
_FIRST_ROOM = 1024
"""Tokens a new context has room for; it doubles as it fills."""


class Context:
    """Tokens that several prompts share and only ever append to: each is kept once."""

    __slots__ = ("_ids", "_length")

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int32)
        self._length = 0

    def first(self, length: int) -> Ids:
        """A view that stays as it is, whatever is appended."""
        view = self._ids[:length]
        view.flags.writeable = False
        return view

    def extended(self, length: int, *new: Ids) -> Context:
        """The first `length` tokens with `new` after them: this context, or a copy if it has gone on."""
        if length != self._length:
            return Context()._append(self._ids[:length], *new)
        return self._append(*new)

    def _append(self, *new: Ids) -> Context:
        needed = self._length + sum(map(len, new))
        if needed > len(self._ids):
            room: Ids = np.empty(max(needed, 2 * len(self._ids), _FIRST_ROOM), np.int32)
            room[: self._length] = self._ids[: self._length]
            self._ids = room
        for ids in new:
            end = self._length + len(ids)
            self._ids[self._length : end] = ids
            self._length = end
        return self


@dataclass(slots=True, eq=False)
class Turn:
    """One committed completion as those after it need it."""

    completion_id: str
    place: int
    messages: tuple[Message, ...]
    """The whole conversation up to and including the sampled message."""
    sampled_ids: Ids
    has_ended: bool
    """Whether the answer ended by itself."""
    link: Link
    shared: int
    """Length of the prefix that its prompt shares with the context it continues."""
    parent: Turn | None
    """The turn whose prompt and sampled ids its own prompt begins with."""
    context: Context
    prompt_length: int
    prompt_checksum: int
    checksum: int
    """Checksum of prompt and sampled ids."""

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.sampled_ids)

    @property
    def opening(self) -> int:
        """Earliest position of the template's opening of the turn: after the message before it."""
        start = max(self.prompt_length - GENERATION_PROMPT, 0)
        if not self.has_ended or not len(self.sampled_ids):
            return start
        ends = np.flatnonzero(self.prompt_ids()[start:] == self.sampled_ids[-1])
        return start + int(ends[-1]) + 1 if len(ends) else start

    def prompt_ids(self) -> Ids:
        """Every token the policy conditioned on."""
        return self.context.first(self.prompt_length)

    def ids(self) -> Ids:
        """Every token it conditioned on, and those it sampled after them."""
        return np.concatenate([self.prompt_ids(), self.sampled_ids])

    def common_prefix(self, ids: Ids) -> int:
        """Length of the common prefix of `ids` and this turn's prompt and sampled ids."""
        shared = _common_prefix(ids, self.prompt_ids())
        if shared < self.prompt_length:
            return shared
        return shared + _common_prefix(ids[shared:], self.sampled_ids)


@dataclass(frozen=True, slots=True)
class _Match:
    """The turn that a prompt continues, and how far it does."""

    turn: Turn
    shared: int
    kind: Continuation


class GrowingTree:
    """The turns of a session, each proved against those before it as it is committed."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._by_id: dict[str, Turn] = {}
        self._prompts: dict[tuple[int, int], Turn] = {}
        """Prompts by length and checksum; the first of equal ones."""
        self._contexts: dict[tuple[int, int], Turn] = {}
        """Contexts by length and checksum; the latest of equal ones."""
        self._lengths: list[int] = []
        """Sorted lengths of the contexts."""

    def prove(
        self,
        completion_id: str,
        prompt: Ids,
        sampled: Ids,
        messages: tuple[Message, ...] = (),
        *,
        hints: Iterable[str | None] = (),
        has_ended: bool = True,
    ) -> Turn:
        """Find what a completion extends; `hints` name those that it may extend, the likeliest first."""
        prompt, sampled = (np.ascontiguousarray(ids, np.int32) for ids in (prompt, sampled))
        match, twin, checksum = self._find(prompt, hints)
        link = self._link(prompt, match, twin)
        return Turn(
            completion_id,
            len(self._turns),
            messages,
            sampled,
            has_ended,
            link,
            match.shared if match else 0,
            match.turn if match and match.kind is Continuation.CLEAN else None,
            self._context(prompt, link),
            len(prompt),
            checksum,
            _checksum(sampled, checksum),
        )

    def add(self, turn: Turn) -> Turn:
        """Commit a completion that was proved, before any other is."""
        self._turns.append(turn)
        self._by_id[turn.completion_id] = turn
        if turn.prompt_length:
            self._prompts.setdefault((turn.prompt_length, turn.prompt_checksum), turn)
            self._contexts[turn.length, turn.checksum] = turn
            at = bisect_left(self._lengths, turn.length)
            if self._lengths[at : at + 1] != [turn.length]:
                self._lengths.insert(at, turn.length)
        return turn

    def messages_of(self, place: int | None) -> tuple[Message, ...]:
        return self._turns[place].messages if place is not None else ()

    def _find(self, prompt: Ids, hints: Iterable[str | None]) -> tuple[_Match | None, Turn | None, int]:
        """Find the context of a prompt, the first turn with the same prompt, and the prompt's checksum."""
        if not len(prompt):
            return None, None, 0
        match = self._hinted(prompt, hints)
        if match is not None and match.kind is Continuation.CLEAN:
            checksum = _checksum(prompt[match.shared :], match.turn.checksum)
        else:
            found, checksum = self._longest(prompt, match)
            if found is not None and found.length > (match.shared if match else 0):
                match = _Match(found, found.length, Continuation.CLEAN)
        twin = self._prompts.get((len(prompt), checksum))
        if twin is not None and prompt.tobytes() != twin.prompt_ids().tobytes():
            twin = None
        return match, twin, checksum

    def _hinted(self, prompt: Ids, hints: Iterable[str | None]) -> _Match | None:
        best: _Match | None = None
        for hint in hints:
            turn = self._by_id.get(hint or "")
            if turn is None or not turn.prompt_length:
                continue
            shared = turn.common_prefix(prompt)
            if shared == turn.length:
                return _Match(turn, shared, Continuation.CLEAN)
            if best is None or shared > best.shared:
                best = _Match(turn, shared, self._kind(prompt, turn, shared))
        return best

    def _kind(self, prompt: Ids, continued: Turn, shared: int) -> Continuation:
        if shared in (0, len(prompt)):
            return Continuation.REWRITTEN
        turn: Turn | None = continued
        while turn is not None:
            if shared >= max(turn.opening, turn.shared):
                return Continuation.DRIFT
            if shared >= turn.shared:
                return Continuation.REWRITTEN
            turn = self._turns[turn.link.continues] if turn.link.continues is not None else None
        return Continuation.REWRITTEN

    def _longest(self, prompt: Ids, match: _Match | None) -> tuple[Turn | None, int]:
        """The longest context that the prompt begins with, and the prompt's checksum."""
        start = checksum = 0
        if match is not None and match.shared >= match.turn.prompt_length:
            start, checksum = match.turn.prompt_length, match.turn.prompt_checksum
        tokens, found = prompt.data, None
        for length in self._lengths[bisect_left(self._lengths, start) :]:
            if length > len(prompt):
                break
            checksum = zlib.crc32(tokens[start:length], checksum)
            start = length
            found = self._contexts.get((length, checksum), found)
        # A checksum only finds: the tokens decide.
        holds = found is not None and found.common_prefix(prompt) == found.length
        return found if holds else None, zlib.crc32(tokens[start:], checksum)

    def _link(self, prompt: Ids, match: _Match | None, twin: Turn | None) -> Link:
        continues = match.turn.place if match else None
        kind = match.kind if match else None
        resumes = _end_of_answer(prompt, match) if match and kind is Continuation.DRIFT else None
        if twin is not None:
            return Link(twin.place, False, 0, continues, kind, resumes)
        after, past_answer, end = self._boundary(match)
        return Link(after, past_answer, len(prompt) - end, continues, kind, resumes)

    def _boundary(self, match: _Match | None) -> tuple[int | None, bool, int]:
        """The last segment of the continued context that is shared whole, and where it ends."""
        if match is None:
            return None, False, 0
        place: int | None = match.turn.place
        past_answer, end = True, match.turn.length
        while end > match.shared:
            assert place is not None
            turn = self._turns[place]
            if past_answer:
                past_answer, end = False, turn.prompt_length
            else:
                place, past_answer, end = turn.link.after, turn.link.past_answer, end - turn.link.given
        return (place, past_answer, end) if end else (None, False, 0)

    def _context(self, prompt: Ids, link: Link) -> Context:
        if link.after is None:
            return Context().extended(0, prompt)
        before = self._turns[link.after]
        return extended(before.context, before.prompt_length, before.sampled_ids, prompt, link)


def extended(before: Context, prompt_length: int, sampled: Ids, given: Ids, link: Link) -> Context:
    """The context of a prompt that ends with what is `given` and hangs after another by its link."""
    if link.twin is not None:
        return before
    answer = (sampled,) if link.past_answer else ()
    return before.extended(prompt_length, *answer, given[len(given) - link.given :])


def has_ended(reason: FinishReason) -> bool:
    """Whether an answer that ended for this reason ended by itself."""
    return reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)


def _end_of_answer(prompt: Ids, match: _Match) -> int | None:
    """Position in the prompt where the re-tokenised answer ends, or None if unknown.

    An answer that ended by itself ends with its only end-of-turn token; another tokenisation is assumed to be
    at most twice as long.
    """
    start, answer, shared = match.turn.prompt_length, match.turn.sampled_ids, match.shared
    is_single = np.count_nonzero(answer == answer[-1:]) == 1
    if shared < match.turn.opening or not match.turn.has_ended or not is_single:
        return None
    window = prompt[shared : start + 2 * len(answer) + GENERATION_PROMPT]
    ends = np.flatnonzero(window == answer[-1])
    return shared + int(ends[0]) + 1 if len(ends) else None


def _checksum(ids: Ids, before: int) -> int:
    """The checksum of tokens that follow others."""
    return zlib.crc32(ids.data, before)


def _common_prefix(one: Ids, other: Ids) -> int:
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    first = int(differs.argmax()) if count else 0
    return first if count and differs[first] else count
