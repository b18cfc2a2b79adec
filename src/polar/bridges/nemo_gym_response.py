"""A session as one OpenAI response, with the tokens that are trained on the items of their model calls.

A trainer reads the items that carry tokens in order, and each prompt must begin with all that came before it.
So prompts are what stands before in the trace, not what the call was sent: where the two differ (sampled
answers that the next prompt holds in other tokens), the trace is what is trained. Tokens that must not be
trained are part of the next prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from polar.bridges.sessions import Aligned, ScoredSession, aligned
from polar.dialects.responses_output import message_item, text_part
from polar.models.chat import Message, Role
from polar.models.completion import Completion
from polar.models.trace import Trace
from polar.recordings.recording import Recording
from polar.recordings.tree import path

COMPLETED = "completed"


def response(session: ScoredSession, asked: dict[str, Any]) -> dict[str, Any]:
    """The session's one trace; an empty output where there is nothing to learn from."""
    output: list[dict[str, Any]] = []
    created_at = 0.0
    if session.recording is not None:
        for trace in session.traces:
            places = list(_places(session.recording, trace))
            output += _items(places, aligned(trace))
            created_at = places[0][0].started_at
    return {
        "id": f"resp_{session.result.session_id}",
        "object": "response",
        "created_at": created_at,
        "status": COMPLETED,
        "model": session.result.model or "",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": asked.get("tool_choice") or "auto",
        "tools": asked.get("tools") or [],
    }


def _places(recording: Recording, trace: Trace) -> Iterator[tuple[Completion, slice]]:
    """The model calls that the trace was built of, each with the place of what it sampled."""
    by_id = {one.id: one for one in recording.completions}
    segments = recording.trajectory.segments
    last = trace.completion_ids[-1]
    (trained,) = (
        ref.trained for ref in recording.trajectory.traces if segments[ref.trained[-1]].completion_id == last
    )
    start = 0
    for index in path(segments, trained[-1]):
        end = start + len(segments[index].ids)
        if index in trained:
            yield by_id[segments[index].completion_id or ""], slice(start, end)
        start = end


def _items(places: list[tuple[Completion, slice]], whole: Aligned) -> Iterator[dict[str, Any]]:
    before: Completion | None = None
    for number, (call, place) in enumerate(places):
        if before is not None:
            # After what was asked before and what was answered to it.
            yield from _given(call.messages[len(before.messages) + 1 :], number)
        *others, last = _said(call)
        yield from others
        *cut_off, end = _generations(whole, place) or [{}]
        for part, generation in enumerate(cut_off):
            yield message_item(f"{call.id}_{part}", [text_part("")], COMPLETED) | generation
        yield last | end
        before = call


def _generations(whole: Aligned, place: slice) -> list[dict[str, list[Any]]]:
    """The trained runs of what a call sampled: one, unless a token in the midst of it must not be trained."""
    edges = np.flatnonzero(np.diff(whole.mask[place], prepend=0, append=0)) + place.start
    return [
        {
            "prompt_token_ids": whole.ids[:start].tolist(),
            "generation_token_ids": whole.ids[start:end].tolist(),
            "generation_log_probs": whole.logprobs[start:end].tolist(),
        }
        for start, end in edges.reshape(-1, 2).tolist()
    ]


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
