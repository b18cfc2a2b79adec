"""Whatever the body holds, a request is understood or refused, and every answer to it can be written."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polar.dialects.base import Answer, CallIdentity, HttpRequest, RequestRefused
from polar.dialects.openai_responses import OpenAIResponses
from polar.dialects.responses_output import seal
from polar.models.chat import ChatRequest, FinishReason, Message, Role, ToolCall, Usage

DIALECT = OpenAIResponses()
WHO = CallIdentity("abc", "m", 5)

WORDS = st.sampled_from(
    [
        "message",
        "function_call",
        "custom_tool_call",
        "local_shell_call",
        "reasoning",
        "item_reference",
        "function",
        "custom",
        "local_shell",
        "namespace",
        "additional_tools",
        "assistant",
        "user",
        "none",
        "call_1_raw",
        "resp_1_2",
        "polar.reasoning.1.AA",
        "reasoning.encrypted_content",
        "grammar",
        "",
    ]
)
NAMES = st.sampled_from(
    [
        "model",
        "input",
        "type",
        "role",
        "content",
        "text",
        "tools",
        "name",
        "namespace",
        "arguments",
        "call_id",
        "output",
        "action",
        "command",
        "env",
        "summary",
        "encrypted_content",
        "instructions",
        "stream",
        "include",
        "previous_response_id",
        "reasoning",
        "format",
        "parameters",
        "metadata",
        "id",
        "temperature",
        "tool_choice",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6) | WORDS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=6)
    ),
    max_leaves=24,
)

VALID: dict[str, Any] = {
    "model": "m",
    "instructions": "Be good.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules"}]},
        {"role": "user", "content": "hi"},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "s"}],
            "encrypted_content": seal("x"),
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        {"type": "function_call", "name": "find", "namespace": "crm", "arguments": "{}", "call_id": "c1"},
        {"type": "custom_tool_call", "name": "patch", "input": "x", "call_id": "c2"},
        {
            "type": "local_shell_call",
            "call_id": "c3",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "function_call_output", "call_id": "c1", "output": "ok"},
        {
            "type": "custom_tool_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "ok"}],
        },
        {"type": "local_shell_call_output", "id": "c3", "output": "ok"},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "more"}]},
    ],
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
        },
        {"type": "local_shell"},
        {
            "type": "namespace",
            "name": "crm",
            "description": "",
            "tools": [{"type": "function", "name": "find"}],
        },
    ],
    "temperature": 1,
    "max_output_tokens": 5,
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "previous_response_id": "resp_1_2",
    "text": {"format": {"type": "text"}},
    "metadata": {},
}


SAID = {"1": (Message(Role.SYSTEM, "s"), Message(Role.USER, "u"), Message(Role.ASSISTANT, "a"))}


def read(body: bytes) -> ChatRequest | None:
    try:
        return DIALECT.parse(HttpRequest(DIALECT.routes[0], body, recall=SAID.get))
    except RequestRefused as error:
        refused = error
    assert 400 <= DIALECT.error(refused).status < 500
    return None


def answer_all(chat: ChatRequest) -> None:
    """Call every tool of the request, streamed and not."""
    calls = tuple(
        ToolCall(f"call_{number}", tool.name, arguments)
        for number, tool in enumerate(chat.tools)
        for arguments in ('{"input": "x"}', '{"command": ["ls"]}', "[", '{"input": "\\ud83d"}')
    )
    message = Message(Role.ASSISTANT, "Hi", "hm", calls)
    json.loads(DIALECT.respond(WHO, chat, [Answer(message, FinishReason.TOOL_CALLS, Usage(1, 1))]))
    (stream,) = DIALECT.stream(WHO, chat)
    stream.start()
    stream.reasoning("hm")
    for call in calls:
        stream.tool_call(call)
    stream.finish(FinishReason.STOP, Usage(1, 1))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path] * bool(path) + [place for key, item in entries for place in places(item, (*path, key))]


@given(st.binary(max_size=64))
def test_bytes_are_refused(body: bytes) -> None:
    read(body)


@given(JSON)
def test_any_json_is_understood_or_refused(value: Any) -> None:
    read(json.dumps(value).encode())


@settings(max_examples=300)
@given(st.data())
def test_a_request_changed_anywhere_is_understood_or_refused(data: st.DataObject) -> None:
    body = copy.deepcopy(VALID)
    for path in data.draw(st.lists(st.sampled_from(places(VALID)), min_size=1, max_size=3)):
        parent: Any = body
        try:
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = data.draw(JSON)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    chat = read(json.dumps(body).encode())
    if chat is not None:
        answer_all(chat)


@given(st.integers(min_value=0, max_value=len(json.dumps(VALID)) - 1))
def test_a_truncated_body_is_refused(end: int) -> None:
    assert read(json.dumps(VALID).encode()[:end]) is None


def test_the_whole_body_is_understood_and_answered() -> None:
    chat = read(json.dumps(VALID).encode())
    assert chat is not None
    answer_all(chat)
