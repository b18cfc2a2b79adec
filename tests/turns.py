"""Sampled turns as tests look at them: whole messages, whatever pieces their ids come in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polar.models.chat import Message, Role
from polar.rendering.base import MessageDelta, ResponseParser


def message_of(deltas: Iterable[MessageDelta]) -> Message:
    whole = sum(deltas, MessageDelta())
    return Message(Role.ASSISTANT, whole.content, whole.reasoning or None, whole.tool_calls)


def read_turn(parser: ResponseParser, *pieces: Sequence[int]) -> Message:
    """What a parser makes of a turn whose ids come in these pieces."""
    return message_of([*map(parser.feed, pieces), parser.finish()])
