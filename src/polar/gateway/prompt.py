"""A request in tokens: the exact ids of the conversation it extends, plus those of the new messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from polar.dialects.base import Refusal, RequestRefused
from polar.gateway.conversation import Extension
from polar.models.chat import ChatRequest, Message, Role
from polar.models.completion import Ids
from polar.recordings.growth import Turn
from polar.rendering.base import Renderer, Unrenderable


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What the policy will condition on."""

    ids: Ids
    messages: tuple[Message, ...]
    """The whole request; what the policy sampled stands as it was sampled, not as it was echoed."""
    follows: Turn | None = None
    """The turn whose messages it continues, also where its tokens could not be extended."""


def extend(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt | None:
    """The conversation's ids and those of the new messages; None if there is none, or none to extend so."""
    turn = extension.turn
    if turn is None:
        return None
    new = _named(extension.new_messages, turn.messages[-1])
    bridge = _bridge(turn, new, renderer, is_begun=request.is_begun)
    if bridge is None:
        return None
    ids = np.concatenate([turn.prompt_ids(), turn.sampled_ids, np.array(bridge, np.int32)])
    return Prompt(ids, turn.messages + new, extension.follows)


def render(request: ChatRequest, extension: Extension, renderer: Renderer) -> Prompt:
    """As `extend`, or a first render where that is not possible."""
    extended = extend(request, extension, renderer)
    if extended is not None:
        return extended
    messages, begun = request.messages, list[int]()
    if request.is_begun:
        messages, begun = messages[:-1], _opened(messages[-1], renderer)
    try:
        ids = np.array(renderer.render(messages, request.tools) + begun, np.int32)
    except Unrenderable as error:
        raise RequestRefused(Refusal.MALFORMED, str(error), field="messages") from None
    return Prompt(ids, request.messages, extension.follows)


def _bridge(turn: Turn, new: tuple[Message, ...], renderer: Renderer, *, is_begun: bool) -> list[int] | None:
    """What follows a turn's ids so that the model answers, or goes on with the answer that is begun."""
    if not is_begun:
        return renderer.bridge(turn.prompt_ids(), turn.sampled_ids, new)
    if not new:
        # The answer's beginning is what the model sampled last: it goes on, unless it had ended there.
        has_ended = len(turn.sampled_ids) and turn.sampled_ids[-1] in renderer.stop_token_ids
        return None if has_ended else []
    bridge = renderer.bridge(turn.prompt_ids(), turn.sampled_ids, new[:-1])
    return None if bridge is None else bridge + _opened(new[-1], renderer)


def _opened(begun: Message, renderer: Renderer) -> list[int]:
    """The ids of an answer's beginning that the client gives."""
    is_text = not begun.tool_calls and not begun.reasoning
    ids = renderer.opened(begun.content) if is_text else None
    if ids is None:
        what = "by this model's template" if is_text else "with thoughts or calls"
        raise RequestRefused(
            Refusal.MALFORMED,
            f"The last message is the assistant's, and an answer cannot be begun {what}: "
            "end with a message of the user, or with text of the assistant alone.",
            field="messages",
        )
    return ids


def _named(messages: Sequence[Message], sampled: Message) -> tuple[Message, ...]:
    """Results with the name of the tool they come from: some templates show it, few dialects carry it."""
    names = {call.id: call.name for call in sampled.tool_calls}
    return tuple(
        replace(message, name=names[message.tool_call_id])
        if message.role is Role.TOOL and message.name is None and message.tool_call_id in names
        else message
        for message in messages
    )
