"""Finds the conversation a request extends, and the exact tokens the policy saw and sampled in it.

What a session has said is a tree of messages. A request walks it from the root; the last sampled message it
passes is the turn it extends. A history comes again in the same words nearly always. One that begins like a
path that was walked lately is compared with it as a whole and walks on from its end; each further step
compares a message with the one that came there last. Neither is hashed nor read as JSON again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

import orjson

from polar.gateway.canonical import Key, joined, key_of
from polar.models.chat import Message, Role, ToolDefinition
from polar.recordings.growth import Turn

_LONGEST_SPLIT = 8
"""In how many messages a harness may send one sampled message back."""
_PATHS = 8
"""How many conversations may go on at once before one of them is walked from its root again."""
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
    messages: tuple[Message, ...] = ()
    """The whole request, with recorded messages for those that they stand for."""


class _MessageNode:
    """A point in a conversation: everything said up to it."""

    __slots__ = ("_following", "_last", "_last_message", "turn", "wording")

    def __init__(self) -> None:
        self.turn: Turn | None = None
        """The latest completion whose sampled message ends here."""
        self.wording: str | None = None
        """The recorded text that stands for any other that leads here."""
        self._following: dict[Key, _MessageNode] = {}
        self._last_message: Message | None = None
        self._last: _MessageNode | None = None

    def step(self, message: Message) -> _MessageNode | None:
        """Where a message leads, if it was said here before."""
        last = self._last_message
        if (
            last is not None
            and last.content == message.content
            and last.role is message.role
            and last.tool_calls == message.tool_calls
        ):
            return self._last
        node = self._following.get(key_of(message))
        if node is not None:
            self._last_message, self._last = message, node
        return node

    def grow(self, message: Message) -> _MessageNode:
        """Where a message leads, from now on."""
        node = self.step(message)
        if node is None:
            node = self._last = self._following[key_of(message)] = _MessageNode()
            self._last_message = message
        return node

    def alias(self, message: Message, node: _MessageNode) -> None:
        """Let another wording lead to a node as well."""
        self._following.setdefault(key_of(message), node)


class _Wording(NamedTuple):
    """What messages are compared by, in columns: long histories are compared without a step for each."""

    contents: list[str]
    roles: list[Role]
    calls: list[tuple[int, str, str]]
    """By message, with name and arguments."""

    @classmethod
    def of(cls, messages: Sequence[Message]) -> _Wording:
        return cls(
            [message.content for message in messages],
            [message.role for message in messages],
            [
                (place, call.name, call.arguments)
                for place, message in enumerate(messages)
                if message.tool_calls
                for call in message.tool_calls
            ],
        )

    def first(self, count: int) -> _Wording:
        calls = self.calls[: bisect_left(self.calls, (count, "", ""))]
        return _Wording(self.contents[:count], self.roles[:count], calls)

    def begins(self, other: _Wording) -> bool:
        """Whether another history begins with this one, and someone else speaks next in it."""
        count = len(self.roles)
        # A message of the assistant may be the rest of the last one.
        return other.roles[count : count + 1] != [Role.ASSISTANT] and other.first(count) == self

    def followed_by(self, other: _Wording, kept: Sequence[Message]) -> _Wording:
        """A history that begins with this one, in texts that are kept already where these are equal: clients
        send all of it anew with every request."""
        texts = [message.content for message in kept]
        texts += [call.arguments for message in kept for call in message.tool_calls]
        known = {text: text for text in texts}
        return _Wording(
            self.contents + [known.get(text, text) for text in other.contents[len(self.contents) :]],
            other.roles,
            self.calls
            + [(place, name, known.get(text, text)) for place, name, text in other.calls[len(self.calls) :]],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """Messages that lead from a root to a turn, as they were last sent."""

    root: _MessageNode
    end: _MessageNode
    wording: _Wording

    def __len__(self) -> int:
        return len(self.wording.roles)


_Walked = tuple[_MessageNode | None, int, dict[int, Message]]
"""Where the deepest turn that messages pass ends, how many of them lead there, and the recorded messages that
stand for some of them, by place."""
_NOWHERE: _Walked = None, 0, {}


class Conversations:
    """The conversations of one session."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _MessageNode] = {}
        """By the tools offered, the latest last: they stand before every message."""
        self._latest: tuple[tuple[ToolDefinition, ...], bytes] = (), b"[]"
        self._paths: list[_Path] = []
        """The latest last."""
        self._turns: dict[str, tuple[Turn, _MessageNode, _MessageNode]] = {}
        """By completion, each with the root of its tools and where its sampled message ends."""

    def find(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> Extension:
        root = self._roots.get(self._key(tools))
        end, matched, recorded = self._matched(root, messages) if root is not None else _NOWHERE
        turn = follows = end.turn if end is not None else None
        if turn is None:
            end, _, elsewhere = self._followed(messages, root)
            if end is not None:
                follows, recorded = end.turn, elsewhere
        said = tuple(messages)
        if recorded:
            said = tuple(recorded.get(place, message) for place, message in enumerate(messages))
        return Extension(turn, said[matched:], follows, said)

    def add(self, turn: Turn, tools: Sequence[ToolDefinition]) -> None:
        """Remember a finished completion; the latest of equal ones is the one that is continued."""
        key = self._key(tools)
        root = self._roots.pop(key, None) or _MessageNode()
        self._roots[key] = root
        place = self._grow(turn, root)
        place.turn = turn
        self._turns[turn.completion_id] = (turn, root, place)

    def alias(self, turn: Turn, tools: Sequence[ToolDefinition], said: Sequence[Message]) -> None:
        """Let what was said instead of a turn's last messages before its answer lead to it as well; these
        stand for it from now on."""
        if not said:
            return
        node: _MessageNode | None = self._roots[self._key(tools)]
        first = len(turn.messages) - 1 - len(said)
        for count, message in enumerate(turn.messages[:-1]):
            following = node.step(message) if node is not None else None
            if node is not None and following is not None and count >= first:
                if said[count - first].content != message.content:
                    following.wording = message.content
                node.alias(said[count - first], following)
            node = following

    def known(self, tools: tuple[ToolDefinition, ...]) -> tuple[ToolDefinition, ...]:
        """These tools as they were offered last, where they were: kept once, and compared at a glance."""
        self._key(tools)
        return self._latest[0]

    def tools_length(self, tools: tuple[ToolDefinition, ...]) -> int:
        """How long these tools are in writing."""
        return len(self._key(tools))

    def recall(self, completion_id: str) -> tuple[Message, ...] | None:
        """The whole conversation of a finished completion of this session, its answer last."""
        known = self._turns.get(completion_id)
        return known[0].messages if known is not None else None

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
            place = place.grow(message)
        if len(messages) - said > 1:
            # Some providers' clients send neighbouring messages of the assistant back as one.
            said_from.alias(joined(messages[said:]), place)
        return place

    def _matched(self, root: _MessageNode, messages: Sequence[Message]) -> _Walked:
        """As `_walk`, from the end of the longest path that the messages begin with.

        A path on which recorded messages stand for others is not kept: they are to be replaced every time.
        """
        wording = _Wording.of(messages)
        known = (path for path in self._paths if path.root is root and path.wording.begins(wording))
        path = max(known, key=len, default=_Path(root, root, _Wording.of(())))
        end, matched, recorded = _walk(path.end, messages, len(path))
        if end is not None and end.turn is not None and not recorded:
            others = [other for other in self._paths if other is not path]
            # A client may send in parts what was recorded whole.
            kept_before = len(path.end.turn.messages) if path.end.turn is not None else 0
            passed = path.wording.followed_by(wording.first(matched), end.turn.messages[kept_before:])
            self._paths = [*others[1 - _PATHS :], _Path(root, end, passed)]
        return end, matched, recorded

    def _followed(self, messages: Sequence[Message], root: _MessageNode | None) -> _Walked:
        others = (place for place in reversed(self._roots.values()) if place is not root)
        found = [_walk(place, messages) for place in islice(others, _OTHER_TOOLSETS)]
        return max(found, key=itemgetter(1), default=_NOWHERE)

    def _key(self, tools: Sequence[ToolDefinition]) -> bytes:
        if tools is not self._latest[0]:
            # 1, 1.0 and true are the same to Python, and are not rendered alike.
            key = orjson.dumps(tuple(tools), option=orjson.OPT_SORT_KEYS)
            if key != self._latest[1]:
                self._latest = tuple(tools), key
        return self._latest[1]


def _adds_to(known: tuple[Message, ...], messages: tuple[Message, ...]) -> bool:
    """Whether others spoke after what is known, which then needs no second walk."""
    length = len(known)
    return (
        len(messages) > length
        and messages[length - 1] is known[-1]
        and messages[length].role is not Role.ASSISTANT
        and messages[:length] == known
    )


def _walk(start: _MessageNode, messages: Sequence[Message], count: int = 0) -> _Walked:
    """The first `count` messages lead to `start`."""
    node: _MessageNode | None = start
    found, matched = (start, count) if start.turn is not None else (None, 0)
    recorded: dict[int, Message] = {}
    end = len(messages)
    while node is not None and count < end:
        message = messages[count]
        is_answer = message.role is Role.ASSISTANT
        if is_answer and count + 1 < end and messages[count + 1].role is Role.ASSISTANT:
            node, count = _step_over_split(node, messages, count)
        else:
            node, count = node.step(message), count + 1
            if node is not None and node.wording is not None and not is_answer:
                recorded[count - 1] = replace(message, content=node.wording)
        if is_answer and node is not None and node.turn is not None:
            found, matched = node, count
    return found, matched, recorded


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
