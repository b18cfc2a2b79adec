"""Requests are read as Anthropic reads them; complaints name the field; answers have Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import Answer, CallIdentity, HttpRequest, Refusal, RequestRefused
from polar.gateway.conversation import Conversations
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolChoice,
    ToolDefinition,
    Usage,
)
from polar.recordings.growth import GrowingTree

DIALECT = AnthropicMessages()
COMPLETE, COUNT = DIALECT.routes[:2]
IDENTITY = CallIdentity("1", "m", 5)
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def parse(**fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 10, "messages": [USER]} | fields
    return DIALECT.parse(HttpRequest(COMPLETE, json.dumps(body).encode()))


def heard(role: str, content: Any) -> tuple[Message, ...]:
    return parse(messages=[{"role": role, "content": content}]).messages


def test_a_full_request_is_understood() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    request = parse(
        system=[{"type": "text", "text": "Be"} | cached, {"type": "text", "text": "good"}],
        messages=[
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "secret"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}} | cached,
                {"type": "tool_use", "id": "t2", "name": "g"},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "ok"},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [
                    {"type": "text", "text": "bad"}, {"type": "image", "source": {}}]} | cached,
                {"type": "text", "text": "Go"},
                {"type": "text", "text": "on."},
            ]},
        ],
        tools=[{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True} | cached,
               {"type": "custom", "name": "g", "input_schema": {}}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        thinking={"type": "adaptive"},
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_sequences=["END", ""],
        stream=True,
        metadata={"user_id": "u"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        service_tier="auto",
        some_future_field={"x": 1},
    )  # fmt: skip
    assert request == ChatRequest(
        model="m",
        messages=(
            Message(Role.SYSTEM, "Be\ngood"),
            Message(Role.USER, "hi"),
            Message(
                Role.ASSISTANT, "I look.", "hm", (ToolCall("t1", "f", '{"a":1}'), ToolCall("t2", "g", "{}"))
            ),
            Message(Role.TOOL, "ok", tool_call_id="t1"),
            Message(Role.TOOL, "Error: bad\n[image omitted: this model reads only text]", tool_call_id="t2"),
            Message(Role.USER, "Go\non."),
        ),
        tools=(ToolDefinition("f", "d", SCHEMA), ToolDefinition("g")),
        tool_choice=ToolChoice(parallel=False),
        sampling=Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=10, stop=("END",)),
        omitted={"image": 1},
        stream=True,
        stream_usage=True,
    )


def test_a_string_and_its_block_are_the_same() -> None:
    for role in ("user", "assistant", "system"):
        assert heard(role, "x") == heard(role, [{"type": "text", "text": "x"}])
    assert parse(system="x") == parse(system=[{"type": "text", "text": "x"}])


def test_neighbours_of_one_role_are_one_turn_however_they_are_grouped() -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    apart = parse(
        messages=[USER, USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": [use]}]
    )
    together = parse(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi"}] * 2},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, use]},
        ]
    )
    assert apart == together


def test_the_billing_line_is_not_for_the_model() -> None:
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: a=1"},
        {"type": "text", "text": "Be good"},
    ]
    assert parse(system=blocks) == parse(system="Be good")


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "T", "source": {"type": "text", "data": "d"}}, "T\nd"),
        ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
        ({"type": "document", "source": {"type": "base64", "data": "JVBE"}},
         "[document omitted: this model reads only text]"),
        ({"type": "search_result", "title": "T", "content": [{"type": "text", "text": "r"}]}, "T\nr"),
        ({"type": "image", "source": {"type": "base64", "data": "AA=="}},
         "[image omitted: this model reads only text]"),
        ({"type": "container_upload", "file_id": "f"},
         "[container_upload omitted: this model reads only text]"),
    ],
)  # fmt: skip
def test_what_is_no_text_becomes_some(block: dict[str, Any], text: str) -> None:
    assert heard("user", [block]) == (Message(Role.USER, text),)


@pytest.mark.parametrize(
    ("is_error", "text", "shown"),
    [
        (True, "no such file", "Error: no such file"),
        (True, "Error: exit 1", "Error: exit 1"),
        (True, "<tool_use_error>x</tool_use_error>", "<tool_use_error>x</tool_use_error>"),
        (False, "fine", "fine"),
    ],
)
def test_a_failed_tool_shows_that_it_failed(is_error: bool, text: str, shown: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "t", "content": text, "is_error": is_error}
    assert heard("user", [block]) == (Message(Role.TOOL, shown, tool_call_id="t"),)


def test_only_tools_that_the_harness_runs_and_has_not_deferred_are_offered() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"name": "now", "input_schema": {}},
        {"name": "later", "input_schema": {}, "defer_loading": True},
    ]
    assert parse(tools=tools).tools == (ToolDefinition("now"),)


def test_a_found_tool_is_defined_where_it_is_found() -> None:
    search = {"name": "ToolSearch", "input_schema": {}}
    later = {"name": "later", "description": "d", "input_schema": SCHEMA, "defer_loading": True}
    found = {"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "tool_reference", "tool_name": "later"},
        {"type": "tool_reference", "tool_name": "unknown"}]}  # fmt: skip
    request = parse(tools=[search, later], messages=[{"role": "user", "content": [found]}])
    assert request.tools == parse(tools=[search]).tools
    first, known, unknown, last = request.messages[0].content.split("\n")
    assert (first, last) == ("<functions>", "</functions>")
    definition = json.loads(known.removeprefix("<function>").removesuffix("</function>"))
    assert definition == {"name": "later", "description": "d", "parameters": SCHEMA}
    assert unknown == '<function>{"name":"unknown"}</function>'


def test_a_count_needs_no_max_tokens() -> None:
    body = json.dumps({"model": "m", "messages": [USER]}).encode()
    assert DIALECT.parse(HttpRequest(COUNT, body)).sampling == Sampling()
    assert json.loads(DIALECT.token_count(7)) == {"input_tokens": 7}


def block_at(block: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [USER, "hi"]}, "messages[1]"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        (block_at({}), "messages[0].content[0].type"),
        (block_at({"type": "tool_use"}), "messages[0].content[0].type"),
        (block_at({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
        (block_at({"type": "tool_use", "id": "t", "name": "f", "input": []}, "assistant"),
         "messages[0].content[0].input"),
        (block_at({"type": "tool_use", "name": "f", "input": {}}, "assistant"), "messages[0].content[0].id"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ],
)  # fmt: skip
def test_a_complaint_names_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**fields)
    assert caught.value.refusal is Refusal.MALFORMED
    assert caught.value.field == field


@pytest.mark.parametrize("refusal", list(Refusal))
def test_every_refusal_has_anthropics_shape(refusal: Refusal) -> None:
    answer = DIALECT.error(RequestRefused(refusal, "why", field="f"))
    body = json.loads(answer.body)
    assert 400 <= answer.status < 600
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["message"]) == ("error", "why")
    assert answer.headers["request-id"] == body["request_id"]
    assert answer.headers["x-should-retry"] == (
        "true" if answer.status == 429 or answer.status >= 500 else "false"
    )


@pytest.mark.parametrize(("tokens", "said"), [(99, 99), (None, 65)])
def test_overflow_is_said_in_the_words_harnesses_look_for(tokens: int | None, said: int) -> None:
    error = RequestRefused(Refusal.CONTEXT_OVERFLOW, "why", tokens=tokens, limit=64)
    message = json.loads(DIALECT.error(error).body)["error"]["message"]
    assert message == f"prompt is too long: {said} tokens > 64 maximum"


def answered(message: Message) -> dict[str, Any]:
    answer = Answer(message, FinishReason.TOOL_CALLS, Usage(9, 4, 2))
    body: dict[str, Any] = json.loads(DIALECT.respond(IDENTITY, parse(), [answer]))
    return body


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, body = event.split("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(message: Message) -> list[dict[str, Any]]:
    (encoder,) = DIALECT.stream(IDENTITY, parse())
    pieces = [encoder.start()]
    pieces += [encoder.reasoning(letter) for letter in message.reasoning or ""]
    pieces += [encoder.text(letter) for letter in message.content]
    pieces += [encoder.tool_call(call) for call in message.tool_calls]
    pieces += [encoder.finish(FinishReason.TOOL_CALLS, Usage(9, 4, 2))]
    return events_of(b"".join(pieces))


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message a client makes of a stream, with every rule of the sequence checked."""
    assert [events[0]["type"], *(event["type"] for event in events[-2:])] == [
        "message_start", "message_delta", "message_stop"]  # fmt: skip
    message: dict[str, Any] = events[0]["message"]
    partial = ""
    is_open = False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, partial = True, ""
            continue
        assert is_open
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if partial:
                block["input"] = json.loads(partial)
            continue
        delta = event["delta"]
        match delta["type"]:
            case "input_json_delta":
                partial += delta["partial_json"]
            case "signature_delta":
                block["signature"] = delta["signature"]
            case kind:
                block[kind.removesuffix("_delta")] += delta[kind.removesuffix("_delta")]
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


texts = st.text(max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
odd_arguments = ["", "{", "[1]", "null", '{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}']
arguments = (
    st.dictionaries(texts, json_values, max_size=3).map(json.dumps)
    | json_values.map(json.dumps)
    | texts
    | st.sampled_from([*odd_arguments, '{"_unparsed_arguments": "x"}'])
)
messages = st.builds(
    lambda content, reasoning, calls: Message(
        Role.ASSISTANT,
        content,
        reasoning or None,
        tuple(ToolCall(f"t{index}", name, given) for index, (name, given) in enumerate(calls)),
    ),
    texts,
    texts,
    st.lists(st.tuples(st.text(min_size=1, max_size=9), arguments), max_size=3),
)


@given(messages)
def test_an_echoed_answer_is_the_message_that_was_sampled(message: Message) -> None:
    asked, none = Message(Role.USER, "hi"), np.zeros(0, np.int32)
    conversations = Conversations()
    conversations.add(GrowingTree().prove("c", none, none, (asked, message)), ())
    content = answered(message)["content"]
    found = conversations.find(parse(messages=[USER, {"role": "assistant", "content": content}]).messages, ())
    assert found.turn is not None
    assert found.new_messages == ()
    (echo,) = heard("assistant", content)
    assert echo.reasoning == message.reasoning
    assert [call.id for call in echo.tool_calls] == [call.id for call in message.tool_calls]


@given(messages)
def test_a_stream_assembles_to_the_whole_answer(message: Message) -> None:
    assert assembled(streamed(message)) == answered(message)


def test_a_whole_answer_has_signed_thinking_text_and_parsed_calls() -> None:
    body = answered(Message(Role.ASSISTANT, "Hi", "hm", (ToolCall("t", "f", '{"a": 1}'),)))
    signature = body["content"][0].pop("signature")
    assert signature
    assert body == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "Hi"},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 4,
        },
    }


@pytest.mark.parametrize(
    ("reason", "matched", "said"),
    [
        (FinishReason.STOP, None, "end_turn"),
        (FinishReason.STOP, "END", "stop_sequence"),
        (FinishReason.LENGTH, None, "max_tokens"),
        (FinishReason.TOOL_CALLS, "END", "tool_use"),
    ],
)
def test_stop_reasons(reason: FinishReason, matched: str | None, said: str) -> None:
    answer = Answer(Message(Role.ASSISTANT, "x"), reason, Usage(1, 1), matched)
    whole = json.loads(DIALECT.respond(IDENTITY, parse(), [answer]))
    (encoder,) = DIALECT.stream(IDENTITY, parse())
    delta = events_of(encoder.finish(reason, Usage(1, 1), matched))[0]["delta"]
    assert delta["stop_reason"] == whole["stop_reason"] == said
    assert delta["stop_sequence"] == whole["stop_sequence"] == (matched if said == "stop_sequence" else None)


def test_an_error_ends_a_stream_and_pings_fill_it() -> None:
    (encoder,) = DIALECT.stream(IDENTITY, parse())
    ping, error = events_of(
        encoder.keep_alive() + encoder.error(RequestRefused(Refusal.ENGINE_DOWN, "later"))
    )
    assert ping == {"type": "ping"}
    assert error["error"] == {"type": "overloaded_error", "message": "later"}


def test_the_key_is_in_either_header() -> None:
    assert DIALECT.key({"x-api-key": "abc"}, {}) == "abc"
    assert DIALECT.key({"Authorization": "Bearer abc"}, {}) == "abc"
    assert DIALECT.key({"x-api-key": " ", "Authorization": "Basic abc"}, {}) is None


def test_requests_are_claimed_by_anthropics_headers() -> None:
    assert DIALECT.claims({"anthropic-version": "2023-06-01"})
    assert DIALECT.claims({"x-api-key": "k"})
    assert not DIALECT.claims({"Authorization": "Bearer k"})


def test_models_have_anthropics_list_shape() -> None:
    listed = json.loads(DIALECT.models("m", 4096, 0))
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "m", "m")
    assert listed["data"][0]["created_at"] == "1970-01-01T00:00:00Z"
