"""Requests are read as OpenAI reads them; complaints name the field; answers have OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.base import CallIdentity, HttpRequest, Refusal, RequestRefused
from polar.dialects.openai_chat import OpenAIChat
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolDefinition,
    Usage,
)

DIALECT = OpenAIChat()
ROUTE = DIALECT.routes[0]
USER = {"role": "user", "content": "hi"}


def parse(**fields: Any) -> ChatRequest:
    return DIALECT.parse(HttpRequest(ROUTE, json.dumps({"model": "m", "messages": [USER]} | fields).encode()))


def test_a_full_request_is_understood() -> None:
    request = parse(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "good"}],
            },
            {"role": "user", "content": "hi", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "ok"}]},
        ],
        tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"x": 1}}}],
        temperature=0.5,
        top_p=1,
        seed=3,
        max_tokens=10,
        max_completion_tokens=20,
        stop="END",
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        reasoning_effort="high",
        store=False,
        some_future_field={"x": 1},
    )
    assert request == ChatRequest(
        model="m",
        messages=(
            Message(Role.SYSTEM, "Be good"),
            Message(Role.USER, "hi", name="ann"),
            Message(Role.ASSISTANT, "", "hm", (ToolCall("c1", "f", '{"a": 1}'),)),
            Message(Role.TOOL, "ok", tool_call_id="c1"),
        ),
        tools=(ToolDefinition("f", "d", {"x": 1}),),
        sampling=Sampling(temperature=0.5, top_p=1.0, seed=3, max_tokens=20, stop=("END",)),
        stream=True,
        stream_usage=True,
    )


def test_the_older_function_fields_are_understood() -> None:
    request = parse(
        functions=[{"name": "f"}],
        messages=[
            USER,
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "ok"},
        ],
    )
    assert request.tools == (ToolDefinition("f"),)
    assert request.messages[1].tool_calls == (ToolCall("", "f", "{}"),)
    assert request.messages[2].role is Role.TOOL


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [USER, "hi"]}, "messages[1]"),
        ({"messages": [USER, {"role": "robot", "content": ""}]}, "messages[1].role"),
        ({"messages": [USER, USER, {"role": "user", "content": 5}]}, "messages[2].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"frequency_penalty": "high"}, "frequency_penalty"),
        ({"top_p": True}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"n": 129}, "n"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
    ],
)  # fmt: skip
def test_a_complaint_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**fields)
    assert caught.value.refusal is Refusal.MALFORMED
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"a": NaN}'])
def test_a_body_that_is_no_object_is_malformed(body: bytes) -> None:
    with pytest.raises(RequestRefused) as caught:
        DIALECT.parse(HttpRequest(ROUTE, body))
    answer = DIALECT.error(caught.value)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"


def test_half_a_character_cut_by_javascript_is_tolerated() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud83d"}]}'
    assert DIALECT.parse(HttpRequest(ROUTE, body)).messages[0].content == "a?"


@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_refusal_has_openais_shape(refusal: Refusal) -> None:
    answer = DIALECT.error(RequestRefused(refusal, "why", field="f"))
    error = json.loads(answer.body)["error"]
    assert 400 <= answer.status < 600
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("why", "f")


def test_a_stream_has_role_content_calls_finish_usage_and_done() -> None:
    (encoder,) = DIALECT.stream(CallIdentity("1", "m", 5), parse(stream_options={"include_usage": True}))
    data = b"".join(
        [
            encoder.start(),
            encoder.reasoning("hm"),
            encoder.text("Hi"),
            encoder.keep_alive(),
            encoder.tool_call(ToolCall("a", "f", "{}")),
            encoder.tool_call(ToolCall("b", "g", "{}")),
            encoder.finish(FinishReason.TOOL_CALLS, Usage(3, 2, 1)),
        ]
    )
    events = [event for event in data.decode().split("\n\n") if event and not event.startswith(":")]
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 5
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "Hi"},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function",
                         "function": {"name": "f", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 1, "id": "b", "type": "function",
                         "function": {"name": "g", "arguments": "{}"}}]},
        {},
    ]  # fmt: skip
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_without_being_asked_no_usage_is_streamed() -> None:
    (encoder,) = DIALECT.stream(CallIdentity("1", "m", 5), parse())
    assert b"usage" not in encoder.start() + encoder.finish(FinishReason.STOP, Usage(1, 1))


def test_the_key_is_the_bearer_token() -> None:
    assert DIALECT.key({"Authorization": "Bearer abc"}, {}) == "abc"
    assert DIALECT.key({"Authorization": "bearer abc"}, {}) == "abc"
    assert DIALECT.key({"Authorization": "Basic abc"}, {}) is None
    assert DIALECT.key({}, {}) is None
