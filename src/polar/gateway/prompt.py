"""A request in tokens: the exact ids of the conversation it extends, plus those of the new messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polar.dialects.base import Refusal, RequestRefused
from polar.gateway.conversation import Extension, Turn
from polar.models.chat import ChatRequest, Message, Role
from polar.models.completion import Ids
from polar.rendering.base import Renderer, Unrenderable


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the policy will condition on."""

    parent: Turn | None
    new_ids: Ids
    """What follows the parent's prompt and sampled ids; everything when there is no parent."""
    ids: Ids
    """Every token."""
    messages: tuple[Message, ...]
    """The whole request; what the policy sampled stands as it was sampled, not as it was echoed."""
    follows: Turn | None = None
    """The turn whose messages it continues, also where its tokens could not be extended."""


def extend(extension: Extension, renderer: Renderer) -> Prompt | None:
    """The conversation's ids and those of the new messages; None if there is none, or none to extend so."""
    turn = extension.turn
    if turn is None:
        return None
    new = _named(extension.new_messages, turn.messages[-1])
    bridge = renderer.bridge(turn.prompt_ids(), turn.sampled_ids, new)
    if bridge is None:
        return None
    new_ids = np.array(bridge, np.int32)
    ids = np.concatenate([turn.ids(), new_ids])
    return Prompt(turn, new_ids, ids, turn.messages + new, extension.follows)


def render(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt:
    """As `extend`, or a first render where that is not possible."""
    extended = extend(extension, renderer)
    if extended is not None:
        return extended
    try:
        ids = np.array(renderer.render(request.messages, request.tools), np.int32)
    except Unrenderable as error:
        raise RequestRefused(Refusal.MALFORMED, str(error), field="messages") from None
    return Prompt(None, ids, ids, request.messages, extension.follows)


def _named(messages: Sequence[Message], sampled: Message) -> tuple[Message, ...]:
    """Results with the name of the tool they come from: some templates show it, few dialects carry it."""
    names = {call.id: call.name for call in sampled.tool_calls}
    return tuple(
        replace(message, name=names[message.tool_call_id])
        if message.role is Role.TOOL and message.name is None and message.tool_call_id in names
        else message
        for message in messages
    )
