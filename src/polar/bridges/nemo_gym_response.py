"""A session as one OpenAI response, with each model call's tokens on the last item that it gave.

A trainer reads the items that carry tokens in order, and each prompt must begin with all that came before it:
that is what a trace's completions are.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from polar.bridges.sessions import ScoredSession
from polar.dialects.responses_output import message_item, text_part
from polar.models.chat import Message, Role
from polar.models.completion import Completion

COMPLETED = "completed"


def response(session: ScoredSession, asked: dict[str, Any]) -> dict[str, Any]:
    """The session's one trace; an empty output where there is nothing to learn from."""
    calls = completions(session)
    return {
        "id": f"resp_{session.result.session_id}",
        "object": "response",
        "created_at": calls[0].started_at if calls else 0.0,
        "status": COMPLETED,
        "model": session.result.model or "",
        "output": list(_items(calls)),
        "parallel_tool_calls": True,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
    }


def completions(session: ScoredSession) -> list[Completion]:
    """Those that the trace trains, in order."""
    if session.recording is None:
        return []
    by_id = {one.id: one for one in session.recording.completions}
    return [by_id[id] for trace in session.traces for id in trace.completion_ids]


def is_growing(calls: list[Completion]) -> bool:
    """Whether each call was given all that the one before it was given and sampled."""
    for before, call in pairwise(calls):
        seen = np.concatenate([before.prompt_ids, before.sampled_ids])
        if not np.array_equal(call.prompt_ids[: len(seen)], seen):
            return False
    return True


def _items(calls: list[Completion]) -> Iterator[dict[str, Any]]:
    for number, (before, call) in enumerate(pairwise([None, *calls])):
        assert call is not None
        if before is not None:
            # After what was asked before and what was answered to it.
            yield from _given(call.messages[len(before.messages) + 1 :], number)
        *others, last = _said(call)
        yield from others
        yield last | {
            "prompt_token_ids": call.prompt_ids.tolist(),
            "generation_token_ids": call.sampled_ids.tolist(),
            "generation_log_probs": call.logprobs.tolist(),
        }


def _said(call: Completion) -> list[dict[str, Any]]:
    """What the model gave: at least one item, so that its tokens have a place."""
    message, items = call.response, []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"id": f"rs_{call.id}", "type": "reasoning", "summary": summary})
    if message.content or not message.tool_calls:
        items.append(message_item(call.id, [text_part(message.content)], COMPLETED))
    items += [
        {
            "id": f"fc_{call.id}_{number}",
            "type": "function_call",
            "status": COMPLETED,
            "call_id": tool.id,
            "name": tool.name,
            "arguments": tool.arguments,
        }
        for number, tool in enumerate(message.tool_calls)
    ]
    return items


def _given(messages: tuple[Message, ...], turn: int) -> Iterator[dict[str, Any]]:
    """What the harness answered before it called again."""
    for number, message in enumerate(messages):
        match message.role:
            case Role.TOOL:
                yield {
                    "id": f"fco_{turn}_{number}",
                    "type": "function_call_output",
                    "status": COMPLETED,
                    "call_id": message.tool_call_id or "",
                    "output": message.content,
                }
            case Role.ASSISTANT:
                yield message_item(f"{turn}_{number}", [text_part(message.content)], COMPLETED)
            case Role.USER | Role.SYSTEM:
                yield {"type": "message", "role": str(message.role), "content": message.content}
