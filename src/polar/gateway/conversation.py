"""Finds the conversation a request extends, and the exact tokens the policy saw and sampled in it.

What a session has said is a tree of places, one for every message in its context. A request walks it
from the root; the last sampled message it passes is the turn it extends. Where it begins as one that was
matched lately, which is nearly always, the walk begins at that one's end: a long history costs a few
comparisons of memory and is neither hashed nor read as JSON again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import orjson

from polar.gateway.canonical import Key, joined, key_of
from polar.models.chat import Message, Role, ToolDefinition
from polar.recordings.growth import Turn

_LONGEST_SPLIT = 8
"""In how many messages a harness may send one sampled message back."""
_SHORTCUTS = 8
"""How many conversations may go on at once before one of them is walked from its beginning again."""
_OTHER_TOOLSETS = 8
"""How many other sets of tools are searched, the latest first, for what a request follows."""


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """How a request continues what was sampled before."""

    turn: Turn | None
    """None: the request begins a conversation."""
    new_messages: tuple[Message, ...]
    follows: Turn | None = None
    """The deepest turn whose messages the request repeats, also where its tools are others."""


class _MessageNode:
    """A point in a conversation: everything said up to it."""

    __slots__ = ("following", "turn")

    def __init__(self) -> None:
        self.turn: Turn | None = None
        """The latest completion whose sampled message ends here."""
        self.following: dict[Key, _MessageNode] = {}

    def step(self, message: Message) -> _MessageNode | None:
        """Where a message leads, if it was said here before."""
        return self.following.get(key_of(message))


class HistoryPrefix:
    """The wording of a history, as lists that are compared without a step for each message.

    Two of one wording lead to the same place.
    """

    __slots__ = ("_calls", "_contents", "_roles")

    def __init__(self, roles: list[Role], contents: list[str], calls: list[tuple[int, str, str]]) -> None:
        self._roles = roles
        self._contents = contents
        self._calls = calls
        """Which message has a call, its name and its arguments as they were sent."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> HistoryPrefix:
        return cls(
            [message.role for message in messages],
            [message.content for message in messages],
            [
                (place, call.name, call.arguments)
                for place, message in enumerate(messages)
                if message.tool_calls
                for call in message.tool_calls
            ],
        )

    def __len__(self) -> int:
        return len(self._roles)

    def begins(self, other: HistoryPrefix) -> bool:
        """Whether another history starts with this one, and someone else speaks next in it."""
        length, calls = len(self._roles), len(self._calls)
        return (
            other._contents[:length] == self._contents
            and other._roles[:length] == self._roles
            and other._calls[:calls] == self._calls
            and (calls == len(other._calls) or other._calls[calls][0] >= length)
            # A message of the assistant may be the rest of the last one.
            and (length == len(other._roles) or other._roles[length] is not Role.ASSISTANT)
        )

    def first(self, length: int, known: HistoryPrefix | None, kept: Sequence[Message]) -> HistoryPrefix:
        """The beginning of it, in strings that are kept already where these read the same."""
        start = len(known) if known is not None else 0
        contents = list(known._contents) if known is not None else []
        for place in range(start, length):
            content = self._contents[place]
            same = place < len(kept) and kept[place].content == content
            contents.append(kept[place].content if same else content)
        calls = self._calls[: bisect_left(self._calls, (length, "", ""))]
        return HistoryPrefix(self._roles[:length], contents, calls)


@dataclass(frozen=True, slots=True, eq=False)
class _Shortcut:
    """Where a history that was matched before leads."""

    root: _MessageNode
    trail: HistoryPrefix
    place: _MessageNode


class Conversations:
    """The conversations of one session."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _MessageNode] = {}
        """By the tools offered, the latest last: they stand before every message."""
        self._latest: tuple[tuple[ToolDefinition, ...], bytes] | None = None
        self._shortcuts: list[_Shortcut] = []
        """The latest last."""
        self._turns: dict[str, tuple[Turn, _MessageNode, _MessageNode]] = {}
        """By completion, each with the root of its tools and where its sampled message ends."""

    def find(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Extension:
        root = self._roots.get(self._key(tools))
        place, matched = self._matched(root, messages) if root is not None else (None, 0)
        turn = place.turn if place is not None else None
        follows = turn or self._followed(messages, root)
        return Extension(turn, tuple(messages[matched:]), follows)

    def add(self, turn: Turn, tools: Sequence[ToolDefinition]) -> None:
        """Remember a finished completion; the latest of equal ones is the one that is continued."""
        key = self._key(tools)
        root = self._roots.pop(key, None) or _MessageNode()
        self._roots[key] = root
        place = self._grow(turn, root)
        place.turn = turn
        self._turns[turn.completion_id] = (turn, root, place)

    def known(self, tools: tuple[ToolDefinition, ...]) -> tuple[ToolDefinition, ...]:
        """These tools as they were offered last, where they were: kept once, and compared at a glance."""
        return self._latest[0] if self._latest is not None and self._latest[0] == tools else tools

    def tools_length(self, tools: tuple[ToolDefinition, ...]) -> int:
        """How long these tools are in writing."""
        return len(self._key(tools))

    def recall(self, completion_id: str) -> tuple[Message, ...] | None:
        """The whole conversation of a finished completion of this session, its answer last."""
        known = self._turns.get(completion_id)
        return known[0].messages if known is not None else None

    def _matched(self, root: _MessageNode, messages: Sequence[Message]) -> tuple[_MessageNode | None, int]:
        """As `_walk`, from the end of the longest history that is known to the letter."""
        trail = HistoryPrefix.of(messages)
        known = [short for short in self._shortcuts if short.root is root and short.trail.begins(trail)]
        short = max(known, key=lambda known: len(known.trail), default=None)
        if short is None:
            place, matched = _walk(root, messages)
        else:
            self._shortcuts.remove(short)
            place, matched = _walk(short.place, messages, len(short.trail))
        if place is not None and place.turn is not None:
            past = trail.first(matched, short.trail if short else None, place.turn.messages)
            self._shortcuts = [*self._shortcuts[1 - _SHORTCUTS :], _Shortcut(root, past, place)]
        return place, matched

    def _grow(self, turn: Turn, root: _MessageNode) -> _MessageNode:
        place, messages = root, turn.messages
        if turn.parent is not None and turn.parent.completion_id in self._turns:
            parent, its_root, its_end = self._turns[turn.parent.completion_id]
            if its_root is root and _adds_to(parent.messages, messages):
                place, messages = its_end, messages[len(parent.messages) :]
        said_from, said = place, 0
        for count, message in enumerate(messages):
            if message.role is not Role.ASSISTANT:
                said = count + 1
            elif count == said:
                said_from = place
            place = place.following.setdefault(key_of(message), _MessageNode())
        if len(messages) - said > 1:
            # Some providers' clients send neighbouring messages of the assistant back as one.
            said_from.following.setdefault(key_of(joined(messages[said:])), place)
        return place

    def _followed(self, messages: Sequence[Message], root: _MessageNode | None) -> Turn | None:
        others = (place for place in reversed(self._roots.values()) if place is not root)
        found = [_walk(place, messages) for place in islice(others, _OTHER_TOOLSETS)]
        deepest, _ = max(found, key=lambda walked: walked[1], default=(None, 0))
        return deepest.turn if deepest is not None else None

    def _key(self, tools: Sequence[ToolDefinition]) -> bytes:
        if self._latest is not None and self._latest[0] == tuple(tools):
            return self._latest[1]
        key = orjson.dumps(tuple(tools), option=orjson.OPT_SORT_KEYS)
        self._latest = (tuple(tools), key)
        return key


def _adds_to(known: tuple[Message, ...], messages: tuple[Message, ...]) -> bool:
    """Whether others spoke after what is known, which then needs no second walk."""
    length = len(known)
    return (
        len(messages) > length
        and messages[length - 1] is known[-1]
        and messages[length].role is not Role.ASSISTANT
        and messages[:length] == known
    )


def _walk(
    start: _MessageNode, messages: Sequence[Message], count: int = 0
) -> tuple[_MessageNode | None, int]:
    """The deepest place with a turn that the messages pass, and how many of them lead to it.

    The first `count` of them lead to `start`.
    """
    place: _MessageNode | None = start
    found, matched = (start, count) if start.turn is not None else (None, 0)
    end = len(messages)
    while place is not None and count < end:
        message = messages[count]
        if message.role is not Role.ASSISTANT:
            place, count = place.step(message), count + 1
            continue
        if count + 1 < end and messages[count + 1].role is Role.ASSISTANT:
            place, count = _step_over_split(place, messages, count)
        else:
            place, count = place.step(message), count + 1
        if place is not None and place.turn is not None:
            found, matched = place, count
    return found, matched


def _step_over_split(
    place: _MessageNode, messages: Sequence[Message], start: int
) -> tuple[_MessageNode | None, int]:
    """A step over neighbouring messages of the assistant, which may be one that was sampled whole."""
    end = start + 1
    while end < len(messages) and messages[end].role is Role.ASSISTANT and end - start < _LONGEST_SPLIT:
        end += 1
    for stop in range(end, start + 1, -1):
        whole = place.step(joined(messages[start:stop]))
        if whole is not None:
            return whole, stop
    return place.step(messages[start]), start + 1
