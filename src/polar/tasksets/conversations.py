"""A session's conversations as chat messages, each with its trace where the engine gave tokens."""

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
    """What was said, in OpenAI's words, from the system prompt to the last answer."""

    messages: tuple[dict[str, Any], ...]
    prompt_messages: int
    """How many of them stand before the first answer that is to be learnt."""
    tools: str
    """What the harness offered, as JSON text: schemas of different tools have no columns in common."""
    lineage: Lineage
    trace: Trace | None
    """None: the engine gave no tokens, and there is only text."""

    @property
    def prompt(self) -> tuple[dict[str, Any], ...]:
        return self.messages[: self.prompt_messages]

    @property
    def answer(self) -> tuple[dict[str, Any], ...]:
        return self.messages[self.prompt_messages :]


def conversations(recording: Recording) -> Iterator[SftConversation]:
    """One for each trace; of a session without traces, one for each conversation that it ended with."""
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
    """Equal for two sessions in which the same was answered: in tokens where there are any, else in words."""
    seen = hashlib.sha256()
    for conversation in found:
        trace = conversation.trace
        said = trace.response_ids.tobytes() if trace is not None else orjson.dumps(conversation.answer)
        seen.update(len(said).to_bytes(8, "little") + said)
    return seen.digest()


def _text_chains(completions: Sequence[Completion]) -> Iterator[list[Completion]]:
    """From each completion that none continues, back to the first that it continues."""
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
        # A harness may echo less than was sampled, a thought for one; the tokens hold all of it.
        for completion in chain[:-1]:
            place = len(completion.messages)
            if place < len(last.messages) and said[place].role is Role.ASSISTANT:
                said[place] = completion.response
    ids = _CallIds()
    return SftConversation(
        messages=tuple(_message(message, ids) for message in said),
        prompt_messages=min(len(chain[0].messages), len(said) - 1),
        tools=orjson.dumps([_tool(tool) for tool in last.tools]).decode(),
        lineage=lineage,
        trace=trace,
    )


class _CallIds:
    """Ids of tool calls by their order: those that a gateway made up differ from run to run."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def of_call(self, call: ToolCall) -> str:
        # An id that the model sampled tells the tool's name; it is part of what is to be learnt.
        return self._given.setdefault(call.id, call.id if call.name in call.id else self._next())

    def of_answer(self, id: str) -> str:
        return self._given.setdefault(id, self._next())

    def _next(self) -> str:
        return f"call_{len(self._given)}"


def _message(message: Message, ids: _CallIds) -> dict[str, Any]:
    """The same keys in every message, as tables want it; those that it does not have are None."""
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


def _tool(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
