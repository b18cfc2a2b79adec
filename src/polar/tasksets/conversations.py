"""A session's conversations as chat messages, each with its trace if the engine returned tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.models.completion import Completion
from polar.models.trace import Lineage, Trace
from polar.recordings.recording import Recording
from polar.trajectory.materialise import materialise


@dataclass(frozen=True, slots=True, eq=False)
class SftConversation:
    """A conversation in OpenAI's format, from the system prompt to the last answer."""

    messages: tuple[dict[str, Any], ...]
    prompt_messages: int
    """The number of messages before the first answer that is to be learned."""
    tools: str
    """The harness's tools as JSON text, since schemas of different tools have no columns in common."""
    lineage: Lineage
    trace: Trace | None
    """The trace; None if the engine returned only text."""

    @property
    def prompt(self) -> tuple[dict[str, Any], ...]:
        return self.messages[: self.prompt_messages]

    @property
    def answer(self) -> tuple[dict[str, Any], ...]:
        return self.messages[self.prompt_messages :]


def conversations(recording: Recording) -> Iterator[SftConversation]:
    """Yield one conversation per trace; without traces, one per conversation of the session."""
    by_id = {completion.id: completion for completion in recording.completions}
    if recording.trajectory.traces:
        for ref in recording.trajectory.traces:
            trace = materialise(recording.trajectory, ref)
            chain = [by_id[id] for id in trace.completion_ids]
            yield _conversation(chain, trace.lineage, trace)
        return
    for chain in _text_chains(recording.completions):
        yield _conversation(chain, Lineage.MAIN, None)


def digest(found: Sequence[SftConversation]) -> bytes:
    """Return a digest of the answers, in tokens if available, else in text."""
    seen = hashlib.sha256()
    for conversation in found:
        trace = conversation.trace
        said = trace.response_ids.tobytes() if trace is not None else orjson.dumps(conversation.answer)
        seen.update(len(said).to_bytes(8, "little") + said)
    return seen.digest()


def _text_chains(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    by_id = {completion.id: completion for completion in completions}
    continued = {_before(completion) for completion in by_id.values()}
    for last in by_id.values():
        if last.id in continued:
            continue
        chain = [last]
        while (earlier := by_id.get(_before(chain[0]) or "")) is not None:
            chain.insert(0, earlier)
        yield chain


def _before(completion: Completion) -> str | None:
    return completion.parent or completion.follows


def _conversation(chain: Sequence[Completion], lineage: Lineage, trace: Trace | None) -> SftConversation:
    last = chain[-1]
    said = [*last.messages, last.response]
    if trace is not None:
        # A harness may echo less than was sampled (thoughts, for example); the tokens have all of it.
        for completion in chain[:-1]:
            place = len(completion.messages)
            if place < len(last.messages) and said[place].role is Role.ASSISTANT:
                said[place] = completion.response
    ids = _CallIds()
    return SftConversation(
        messages=tuple(_message(message, ids) for message in said),
        prompt_messages=min(len(chain[0].messages), len(said) - 1),
        tools=orjson.dumps([tool_schema(tool) for tool in last.tools]).decode(),
        lineage=lineage,
        trace=trace,
    )


class _CallIds:
    """Numbers tool calls in order, since ids made up by a gateway differ from run to run."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def of_call(self, call: ToolCall) -> str:
        # An id that the model sampled contains the tool's name, and is part of what is to be learned.
        return self._given.setdefault(call.id, call.id if call.name in call.id else self._next())

    def of_answer(self, id: str) -> str:
        return self._given.setdefault(id, self._next())

    def _next(self) -> str:
        return f"call_{len(self._given)}"


def _message(message: Message, ids: _CallIds) -> dict[str, Any]:
    """Return a message with the same keys as every other, None for those it lacks, as tables need."""
    calls = [
        {
            "id": ids.of_call(call),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]
    return {
        "role": message.role.value,
        "content": message.content,
        "reasoning_content": message.reasoning,
        "tool_calls": calls or None,
        "tool_call_id": ids.of_answer(message.tool_call_id) if message.tool_call_id is not None else None,
        "name": message.name,
    }


def tool_schema(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
