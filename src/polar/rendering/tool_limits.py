"""Keeps what is sampled without a constraint inside the request's tool choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polar.models.chat import Message, Role, ToolChoice, ToolUse
from polar.rendering.base import MessageDelta, ResponseParser
from polar.rendering.tool_calls import CLOSE, write_call

FIRST_CALL_ENDS = f"\n{CLOSE}"
"""Ends a turn that may hold one call; inside JSON a line break is never raw, so no argument holds it."""


def limited(parser: ResponseParser, choice: ToolChoice) -> ResponseParser:
    """The parser, with calls as text where there may be none, and with the first call only where one may."""
    if choice.use is not ToolUse.NONE and choice.parallel:
        return parser
    return _LimitedParser(parser, choice)


class _LimitedParser(ResponseParser):
    def __init__(self, parser: ResponseParser, choice: ToolChoice) -> None:
        self._parser = parser
        self._choice = choice
        self._message = Message(Role.ASSISTANT)

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        return self._within(self._parser.feed(ids))

    def finish(self) -> MessageDelta:
        return self._within(self._parser.finish())

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    @property
    def message(self) -> Message:
        return self._message

    def _within(self, delta: MessageDelta) -> MessageDelta:
        if delta.tool_calls and self._choice.use is ToolUse.NONE:
            said = "\n".join(write_call(call.name, call.arguments) for call in delta.tool_calls)
            delta = replace(delta, content=delta.content + said, tool_calls=())
        before = self._message
        if before.tool_calls or len(delta.tool_calls) > 1:
            delta = replace(delta, tool_calls=() if before.tool_calls else delta.tool_calls[:1])
        self._message = replace(
            before,
            content=before.content + delta.content,
            reasoning=((before.reasoning or "") + delta.reasoning) or None,
            tool_calls=before.tool_calls + delta.tool_calls,
        )
        return delta
