"""A streamed answer is the whole event sequence of OpenAI's Responses, and ends as the plain one reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.base import Answer, CallIdentity, HttpRequest, Refusal, RequestRefused, StreamEncoder
from polar.dialects.openai_responses import OpenAIResponses
from polar.models.chat import ChatRequest, FinishReason, Message, Role, ToolCall, Usage

DIALECT = OpenAIResponses()
WHO = CallIdentity("abc", "m", 5)
TOOLS = [
    {"type": "function", "name": "f"},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
]


def request(**fields: Any) -> ChatRequest:
    body = {"model": "m", "input": "hi", "tools": TOOLS} | fields
    return DIALECT.parse(HttpRequest(DIALECT.routes[0], json.dumps(body).encode()))


def encoder(**fields: Any) -> StreamEncoder:
    (encoder,) = DIALECT.stream(WHO, request(**fields))
    return encoder


def events(data: bytes) -> list[dict[str, Any]]:
    found = []
    for block in data.decode().split("\n\n")[:-1]:
        name, _, body = block.partition("\ndata: ")
        event = json.loads(body)
        assert name == f"event: {event['type']}"
        found.append(event | {"type": event["type"].removeprefix("response.")})
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_every_kind_of_item_has_its_events() -> None:
    stream = encoder(include=["reasoning.encrypted_content"])
    sent = [
        stream.start(),
        stream.reasoning("h"),
        stream.keep_alive(),
        stream.reasoning("m"),
        stream.text("\n"),
        stream.text("Hi"),
        stream.text(" you"),
        stream.tool_call(ToolCall("c1", "f", '{"a": 1}')),
        stream.tool_call(ToolCall("c2", "patch", '{"input": "x"}')),
        stream.tool_call(ToolCall("c3", "local_shell", '{"command": ["ls"]}')),
        stream.text("\n"),
        stream.finish(FinishReason.TOOL_CALLS, Usage(3, 2, 1)),
    ]
    found = events(b"".join(sent))
    assert [event["type"] for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "in_progress",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "output_item.added",
        "output_item.done",
        "completed",
    ]
    done = [event for event in found if event["type"] == "output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3, 4]
    final = found[-1]["response"]
    assert final["output"] == [event["item"] for event in done]
    assert [item["type"] for item in final["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call", "local_shell_call",
    ]  # fmt: skip
    assert final["output"][1]["content"][0]["text"] == "\nHi you"
    assert final["usage"]["total_tokens"] == 5
    for event in found:
        if "item_id" in event:
            assert event["item_id"] == final["output"][event["output_index"]]["id"]


def test_arguments_that_are_done_name_their_function() -> None:
    sent = encoder().tool_call(ToolCall("c1", "f", '{"a": 1}'))
    done = next(event for event in events(sent) if event["type"] == "function_call_arguments.done")
    assert (done["name"], done["arguments"]) == ("f", '{"a": 1}')


def test_reasoning_is_a_summary_where_one_is_asked_for() -> None:
    stream = encoder(reasoning={"summary": "auto"})
    data = [
        stream.start(),
        stream.reasoning("hm"),
        stream.text("x"),
        stream.finish(FinishReason.STOP, Usage(1, 1)),
    ]
    found = events(b"".join(data))
    assert [event["type"] for event in found[2:8]] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert found[4]["summary_index"] == 0
    assert found[7]["item"]["summary"] == [{"type": "summary_text", "text": "hm"}]


@pytest.mark.parametrize("finish_reason", [FinishReason.STOP, FinishReason.LENGTH])
@pytest.mark.parametrize(
    "message",
    [
        Message(Role.ASSISTANT, ""),
        Message(Role.ASSISTANT, "Hi"),
        Message(Role.ASSISTANT, "", "hm"),
        Message(Role.ASSISTANT, "Hi", "hm", (ToolCall("c", "f", "{}"),)),
        Message(Role.ASSISTANT, "\n\n", "hm", (ToolCall("c", "patch", "{}"),)),
        Message(Role.ASSISTANT, "", None, (ToolCall("c", "local_shell", '{"command": []}'),)),
    ],
)
def test_streamed_and_plain_answers_are_the_same_response(
    message: Message, finish_reason: FinishReason
) -> None:
    chat = request(include=["reasoning.encrypted_content"], instructions="Be good.", metadata={"a": "b"})
    (stream,) = DIALECT.stream(WHO, chat)
    data = stream.start()
    data += stream.reasoning(message.reasoning) if message.reasoning else b""
    data += stream.text(message.content) if message.content else b""
    data += b"".join(map(stream.tool_call, message.tool_calls))
    data += stream.finish(finish_reason, Usage(3, 2))
    last = events(data)[-1]
    plain = json.loads(DIALECT.respond(WHO, chat, [Answer(message, finish_reason, Usage(3, 2))]))
    assert last["response"] == plain
    expected = "incomplete" if finish_reason is FinishReason.LENGTH else "completed"
    assert last["type"] == plain["status"] == expected
    echoed = DIALECT.parse(
        HttpRequest(
            DIALECT.routes[0], json.dumps({"model": "m", "input": plain["output"], "tools": TOOLS}).encode()
        )
    )
    (again,) = echoed.messages
    assert (again.content.strip(), again.reasoning) == (message.content.strip(), message.reasoning)
    assert again.tool_calls == message.tool_calls


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (Refusal.CONTEXT_OVERFLOW, "context_length_exceeded"),
        (Refusal.BUDGET_SPENT, "insufficient_quota"),
        (Refusal.ENGINE_FAILED, "server_error"),
        (Refusal.ENGINE_DOWN, "server_error"),
    ],
)
def test_a_failed_stream_says_why_in_words_clients_react_to(refusal: Refusal, code: str) -> None:
    stream = encoder()
    last = events(stream.start() + stream.text("Hi") + stream.error(RequestRefused(refusal, "why")))[-1]
    assert last["type"] == "failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": code, "message": "why"}


@pytest.mark.parametrize(
    "arguments",
    [
        '{"input": "x", "more": 1}',
        '{"input": 5}',
        '{"input": "\\ud83d"}',
        "{}",
        '{"input": "x"}',
        '{"input": ""}',
    ],
)
def test_a_custom_call_is_echoed_as_it_was_sampled(arguments: str) -> None:
    chat = request()
    answer = Answer(
        Message(Role.ASSISTANT, tool_calls=(ToolCall("call_1", "patch", arguments),)),
        FinishReason.TOOL_CALLS,
        Usage(1, 1),
    )
    (item,) = json.loads(DIALECT.respond(WHO, chat, [answer]))["output"]
    assert item["type"] == "custom_tool_call"
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    said, heard = request(input=[item, output]).messages
    assert said.tool_calls == (ToolCall("call_1", "patch", arguments),)
    assert heard.tool_call_id == "call_1"
