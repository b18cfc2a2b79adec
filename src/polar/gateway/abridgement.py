"""How a call that failed before its first token is recorded: enough to see what it was, whatever it sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polar.models.chat import Message, Sampling
from polar.models.completion import Completion

_KEPT_CHARACTERS = 16 * 1024
"""How much of its messages is recorded, from the end; nothing else of it is long."""
MESSAGES_DROPPED = "messages_dropped"
"""In `Completion.extra`: how many of the first messages are left out of the record."""


def abridged(completion: Completion) -> Completion:
    """The completion with the end of its last messages only, without prompt ids and tools."""
    kept = _last(completion.messages)
    return replace(
        completion,
        prompt_ids=completion.prompt_ids[:0],
        messages=kept,
        tools=(),
        asked=_short(completion.asked),
        used=_short(completion.used),
        extra={**completion.extra, MESSAGES_DROPPED: str(len(completion.messages) - len(kept))},
    )


def _last(messages: Sequence[Message]) -> tuple[Message, ...]:
    kept: list[Message] = []
    room = _KEPT_CHARACTERS
    for message in reversed(messages):
        if message.length > room:
            kept.append(Message(message.role, message.content[-room:]))
            break
        kept.append(message)
        room -= message.length
    return tuple(reversed(kept))


def _short(sampling: Sampling) -> Sampling:
    return replace(sampling, stop=(), logit_bias=())
