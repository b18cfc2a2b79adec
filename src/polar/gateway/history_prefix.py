"""A history as lists of what its messages are known by: long ones are compared without a step for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from polar.models.chat import Message, Role

Call = tuple[int, str, str]
"""Which message has it, its name and its arguments as they were sent."""


class HistoryPrefix:
    """The wording of a history; two of one wording lead to the same place."""

    __slots__ = ("_calls", "_contents", "_roles")

    def __init__(self, roles: list[Role], contents: list[str], calls: list[Call]) -> None:
        self._roles = roles
        self._contents = contents
        self._calls = calls

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
