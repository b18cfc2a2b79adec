"""However a provider's client reshapes a conversation, its dialect reads the same messages from it.

A history is written as each provider's clients write it, with everything they are known to change drawn
at random, and parsed back. What counts is what the policy's context is found by.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import Dialect, HttpRequest
from polar.dialects.google_generate import GoogleGenerate
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses
from polar.gateway.canonical import Key, joined, key_of
from polar.models.chat import Message, Role, ToolCall

Json = dict[str, Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
WORDS = TEXTS.map(lambda text: f"w{text}w")
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1.0, -0.0, 1e3]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), TEXTS, NUMBERS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(TEXTS, inner, max_size=2)),
    max_leaves=4,
)
NAMES = st.sampled_from(["bash", "read", "write"])


@st.composite
def histories(draw: st.DrawFn) -> list[Message]:
    """A conversation as it was sampled: calls are answered in order, and others speak between turns."""
    messages = [Message(Role.SYSTEM, draw(WORDS))] if draw(st.booleans()) else []
    messages.append(Message(Role.USER, draw(WORDS)))
    for turn in range(draw(st.integers(1, 3))):
        given = draw(st.lists(st.tuples(NAMES, st.dictionaries(TEXTS, VALUES, max_size=2)), max_size=2))
        calls = tuple(
            ToolCall(f"call_{turn}{index}", name, json.dumps(value, ensure_ascii=draw(st.booleans())))
            for index, (name, value) in enumerate(given)
        )
        text = draw(st.one_of(st.just(""), WORDS)) if calls else draw(WORDS)
        messages.append(Message(Role.ASSISTANT, text, draw(st.one_of(st.none(), WORDS)), calls))
        messages += [Message(Role.TOOL, draw(TEXTS), tool_call_id=call.id, name=call.name) for call in calls]
        if not calls or draw(st.booleans()):
            messages.append(Message(Role.USER, draw(WORDS)))
    return messages


class Client:
    """A provider's client: draws how it writes what it was given."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def flips(self) -> bool:
        return self.data.draw(st.booleans())

    def one_of(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def trimmed(self, text: str) -> str:
        """Assistants' texts come back with other white space around them."""
        return f"{self.one_of('', ' ', chr(10))}{text}{self.one_of('', chr(10))}"

    def pieces(self, text: str) -> list[str]:
        cut = self.data.draw(st.integers(0, len(text)))
        return [piece for piece in (text[:cut], text[cut:]) if piece] if self.flips() else [text]

    def value(self, arguments: str) -> Any:
        """The arguments as an object, as JavaScript would have it where it is JavaScript."""
        value = json.loads(arguments)
        return javascript(value) if self.flips() else value

    def text(self, arguments: str) -> str:
        """The arguments re-serialised: key order, spacing, escapes, numbers."""
        if self.flips():
            return arguments
        separators = self.one_of((",", ":"), (", ", ": "), (" ,", " : "))
        value = self.value(arguments)
        return json.dumps(value, separators=separators, sort_keys=self.flips(), ensure_ascii=self.flips())


def javascript(value: Any) -> Any:
    """What JSON.parse and JSON.stringify make of a value."""
    match value:
        case bool() | None | str():
            return value
        case int() | float():
            number = float(value)
            return int(number) if number.is_integer() and abs(number) < 1e21 else number
        case list():
            return [javascript(item) for item in value]
        case _:
            items = [(key, javascript(item)) for key, item in value.items()]
            return dict(sorted(items, key=lambda item: not item[0].isdecimal()))


def chat(messages: Sequence[Message], client: Client) -> Json:
    wire: list[Json] = []
    for message in messages:
        content: Any = client.trimmed(message.content) if message.role is Role.ASSISTANT else message.content
        if client.flips():
            content = [{"type": "text", "text": piece} for piece in client.pieces(content)]
        match message.role:
            case Role.SYSTEM:
                wire.append({"role": client.one_of("system", "developer"), "content": content})
            case Role.USER:
                wire.append({"role": "user", "content": content})
            case Role.TOOL:
                wire.append({"role": "tool", "content": content, "tool_call_id": message.tool_call_id})
            case Role.ASSISTANT:
                wire += chat_turns(message, content, client)
    return {"model": "m", "messages": wire}


def chat_turns(message: Message, content: Any, client: Client) -> list[Json]:
    said: Json = {"role": "assistant", "content": content if message.content else client.one_of(None, "")}
    if message.reasoning and client.flips():
        said[client.one_of("reasoning_content", "reasoning")] = message.reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": client.text(call.arguments)},
        }
        for call in message.tool_calls
    ]
    if not calls:
        return [said]
    if message.content and client.flips():
        return [said, {"role": "assistant", "content": None, "tool_calls": calls}]
    return [said | {"tool_calls": calls}]


def responses(messages: Sequence[Message], client: Client) -> Json:
    body: Json = {"model": "m", "input": []}
    items: list[Json] = body["input"]
    for place, message in enumerate(messages):
        parts = [{"type": "input_text", "text": piece} for piece in client.pieces(message.content)]
        match message.role:
            case Role.SYSTEM if client.flips():
                body["instructions"] = message.content
            case Role.SYSTEM | Role.USER:
                role = "user" if message.role is Role.USER else client.one_of("system", "developer")
                items.append(
                    {"type": "message", "role": role, "content": client.one_of(message.content, parts)}
                )
            case Role.TOOL:
                output = client.one_of(message.content, parts)
                items.append(
                    {"type": "function_call_output", "call_id": message.tool_call_id, "output": output}
                )
            case Role.ASSISTANT:
                items += response_items(message, f"{place:024x}", client)
    return body


def response_items(message: Message, completion: str, client: Client) -> list[Json]:
    keeps_ids = client.flips()
    items: list[Json] = []
    if message.reasoning and client.flips():
        items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": message.reasoning}]})
    if message.content:
        text = client.trimmed(message.content)
        content = [{"type": "output_text", "text": piece} for piece in client.pieces(text)]
        items.append({"type": "message", "role": "assistant", "content": client.one_of(text, content)})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": client.text(call.arguments),
        }
        for call in message.tool_calls
    ]
    return (
        [{"id": f"x_{completion}_{index}", **item} for index, item in enumerate(items)]
        if keeps_ids
        else items
    )


def anthropic(messages: Sequence[Message], client: Client) -> Json:
    body: Json = {"model": "m", "max_tokens": 9, "messages": []}
    wire: list[Json] = body["messages"]
    for message in messages:
        block: Json = {"type": "text", "text": message.content}
        if client.flips():
            block["cache_control"] = {"type": "ephemeral"}
        match message.role:
            case Role.SYSTEM:
                body["system"] = client.one_of(message.content, [block])
            case Role.USER:
                heard(wire, client.one_of(message.content, [block]), client)
            case Role.TOOL:
                result = {"type": "tool_result", "tool_use_id": message.tool_call_id}
                shown: Any = client.one_of(message.content, [block])
                heard(wire, [result | ({"content": shown} if message.content else {})], client)
            case Role.ASSISTANT:
                blocks = anthropic_blocks(message, client)
                at_once = client.flips()
                wire += (
                    [{"role": "assistant", "content": blocks}]
                    if at_once
                    else [{"role": "assistant", "content": [block]} for block in blocks]
                )
    return body


def heard(wire: list[Json], content: Any, client: Client) -> None:
    """Clients put what comes between two turns into one message, or into several."""
    last = wire[-1]["content"] if wire and wire[-1]["role"] == "user" else None
    if isinstance(last, list) and isinstance(content, list) and client.flips():
        last += content
    else:
        wire.append({"role": "user", "content": content})


def anthropic_blocks(message: Message, client: Client) -> list[Json]:
    blocks: list[Json] = []
    if message.reasoning:
        signed = {"type": "thinking", "thinking": message.reasoning, "signature": "c2ln"}
        hidden = {"type": "redacted_thinking", "data": "c2ln"}
        blocks += client.one_of([], [signed], [hidden], [{**signed, "thinking": ""}])
    if message.content:
        blocks += [
            {"type": "text", "text": piece} for piece in client.pieces(client.trimmed(message.content))
        ]
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": client.value(call.arguments)}
        for call in message.tool_calls
    ]
    return blocks


def google(messages: Sequence[Message], client: Client) -> Json:
    body: Json = {"contents": []}
    contents: list[Json] = body["contents"]
    for message in messages:
        match message.role:
            case Role.SYSTEM:
                instruction = {"parts": [{"text": message.content}]}
                name = client.one_of("systemInstruction", "system_instruction")
                body[name] = client.one_of(instruction, instruction | {"role": "user"}, message.content)
            case Role.USER:
                google_said(contents, "user", [{"text": message.content}], client)
            case Role.TOOL:
                answer: Json = {
                    "name": message.name,
                    "response": {client.one_of("output", "result"): message.content},
                }
                if client.flips():
                    answer["id"] = message.tool_call_id
                google_said(
                    contents,
                    "user",
                    [{client.one_of("functionResponse", "function_response"): answer}],
                    client,
                )
            case Role.ASSISTANT:
                for part in google_parts(message, client):
                    google_said(contents, "model", [part], client)
    return body


def google_said(contents: list[Json], role: str, parts: list[Json], client: Client) -> None:
    if contents and contents[-1]["role"] == role and client.flips():
        contents[-1]["parts"] += parts
    else:
        contents.append({"role": role, "parts": parts})


def google_parts(message: Message, client: Client) -> list[Json]:
    parts: list[Json] = []
    if message.reasoning and client.flips():
        parts.append({"text": message.reasoning, "thought": True})
    if message.content:
        parts += [{"text": piece} for piece in client.pieces(client.trimmed(message.content))]
    for call in message.tool_calls:
        asked: Json = {"name": call.name, "args": client.value(call.arguments)}
        if client.flips():
            asked["id"] = call.id
        part: Json = {client.one_of("functionCall", "function_call"): asked}
        if client.flips():
            part["thoughtSignature"] = base64.b64encode(f"polar:{call.id}\nhm".encode()).decode()
        parts.append(part)
    return parts


WRITERS: list[tuple[Dialect, Callable[[Sequence[Message], Client], Json]]] = [
    (OpenAIChat(), chat),
    (OpenAIResponses(), responses),
    (AnthropicMessages(), anthropic),
    (GoogleGenerate(), google),
]


@pytest.mark.parametrize(("dialect", "write"), WRITERS, ids=lambda value: getattr(value, "name", ""))
@given(history=histories(), data=st.data())
def test_a_reshaped_history_reads_as_it_was(
    dialect: Dialect,
    write: Callable[[Sequence[Message], Client], Json],
    history: list[Message],
    data: st.DataObject,
) -> None:
    body = json.dumps(write(history, Client(data))).encode()
    parsed = dialect.parse(HttpRequest(dialect.routes[0], body, {"model": "m"}))
    assert keys(parsed.messages) == keys(history)
    results = [message.tool_call_id for message in parsed.messages if message.role is Role.TOOL]
    calls = [call.id for message in parsed.messages for call in message.tool_calls]
    assert results == calls


def keys(messages: Sequence[Message]) -> list[Key]:
    """What each message is known by; neighbours of the assistant as the one that was sampled."""
    merged: list[Message] = []
    for message in messages:
        if merged and message.role is merged[-1].role is Role.ASSISTANT:
            message = joined([merged.pop(), message])
        merged.append(message)
    return [key_of(message) for message in merged]
