"""Requests are read as Google reads them; complaints name the field; answers have Google's shape."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.base import (
    Answer,
    CallIdentity,
    HttpRequest,
    Refusal,
    RequestRefused,
    Route,
    RouteAction,
)
from polar.dialects.google_generate import GoogleGenerate
from polar.models.chat import (
    ChatRequest,
    FinishReason,
    JsonOutput,
    Message,
    Role,
    Sampling,
    ToolCall,
    ToolDefinition,
    Usage,
)

DIALECT = GoogleGenerate()
GENERATE, STREAM, COUNT = DIALECT.routes[:3]
IDENTITY = CallIdentity("r1", "m", 7)
HI = {"role": "user", "parts": [{"text": "hi"}]}
USAGE = Usage(10, 5, 4)
THINKING: dict[str, Any] = {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}


def parse(route: Route = GENERATE, query: dict[str, str] | None = None, **fields: Any) -> ChatRequest:
    body = json.dumps({"contents": [HI]} | fields).encode()
    return DIALECT.parse(HttpRequest(route, body, {"model": "m"}, query or {}))


def said(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def test_a_full_request_is_understood() -> None:
    request = parse(
        systemInstruction={"parts": [{"text": "Be"}, {"text": "good"}]},
        contents=[
            HI,
            said(
                {"text": "hm", "thought": True},
                {"text": "I "},
                {"text": "look.", "thoughtSignature": "c2lnbmVk"},
                {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}},
            ),
            {
                "role": "user",
                "parts": [{"functionResponse": {"id": "c1", "name": "f", "response": {"output": "ok"}}}],
            },
        ],
        tools=[
            {"functionDeclarations": [{"name": "f", "description": "d", "parametersJsonSchema": {"x": 1}}]},
            {"googleSearch": {}},
        ],
        toolConfig={"functionCallingConfig": {"mode": "AUTO"}},
        generationConfig={
            "temperature": 0.5,
            "topP": 1,
            "topK": 40.0,
            "seed": 3,
            "maxOutputTokens": 20,
            "stopSequences": ["END"],
            "candidateCount": 1,
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT"},
            "presencePenalty": 0.1,
        },
        safetySettings=[{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        labels={"a": "b"},
        someFutureField={"x": 1},
    )
    assert request == ChatRequest(
        model="m",
        messages=(
            Message(Role.SYSTEM, "Be\ngood"),
            Message(Role.USER, "hi"),
            Message(Role.ASSISTANT, "I look.", "hm", (ToolCall("c1", "f", '{"a":1}'),)),
            Message(Role.TOOL, "ok", tool_call_id="c1", name="f"),
        ),
        tools=(ToolDefinition("f", "d", {"x": 1}),),
        output=JsonOutput({"type": "object"}),
        sampling=Sampling(
            temperature=0.5, top_p=1.0, top_k=40, seed=3, max_tokens=20, stop=("END",), presence_penalty=0.1
        ),
        wire={"events": False, "thoughts": False},
    )


def test_snake_case_and_single_objects_mean_the_same() -> None:
    request = parse(
        contents={"parts": {"text": "hi"}},
        system_instruction={"parts": {"text": "Be good"}},
        generation_config={
            "max_output_tokens": 5,
            "top_p": 0.5,
            "top_k": 2,
            "stop_sequences": ["X"],
            "thinking_config": {"include_thoughts": True},
        },
        tools={"function_declarations": {"name": "f", "parameters_json_schema": {"x": 1}}},
    )
    assert request.messages == (Message(Role.SYSTEM, "Be good"), Message(Role.USER, "hi"))
    assert request.sampling == Sampling(max_tokens=5, top_p=0.5, top_k=2, stop=("X",))
    assert request.tools == (ToolDefinition("f", "", {"x": 1}),)
    assert request.wire["thoughts"]
    turns = parse(
        contents=[
            HI,
            said({"function_call": {"name": "f", "args": {}}, "thought_signature": "x"}),
            {"role": "function", "parts": [{"function_response": {"name": "f", "response": {"output": 1}}}]},
        ]
    ).messages
    assert (turns[1].tool_calls[0].name, turns[2].content) == ("f", "1")


@pytest.mark.parametrize("given", ["Be good", {"text": "Be good"}, [{"text": "Be"}, {"text": "good"}]])
def test_a_system_instruction_comes_in_many_forms(given: Any) -> None:
    system = parse(systemInstruction=given).messages[0]
    assert (system.role, system.content.split()) == (Role.SYSTEM, ["Be", "good"])


def test_all_a_model_said_in_one_turn_is_one_message() -> None:
    contents = [HI, said({"text": "a"}), said({"text": "b"}), said({"functionCall": {"name": "f"}}), said()]
    assert parse(contents=contents).messages[1:] == (
        Message(Role.ASSISTANT, "ab", tool_calls=(ToolCall("call_1", "f", "{}"),)),
    )


def test_adjacent_user_contents_are_one_message_however_they_are_split() -> None:
    apart = [{"parts": [{"text": "a"}]}, {"role": "user", "parts": [{"text": "b"}, {"text": ""}]}]
    together = [{"role": "user", "parts": [{"text": "a"}, {"text": "b"}]}]
    assert parse(contents=apart).messages == parse(contents=together).messages
    assert parse(contents=apart).messages == (Message(Role.USER, "a\nb"),)


def test_results_without_ids_answer_the_calls_of_their_name_in_order() -> None:
    calls: list[dict[str, Any]] = [{"functionCall": {"name": name, "args": {}}} for name in ("f", "g", "f")]
    results = [
        {"functionResponse": {"name": name, "response": {"result": value}}}
        for name, value in (("g", "1"), ("f", "2"), ("f", "3"), ("h", "4"))
    ]
    contents = [HI, said(*calls), {"role": "user", "parts": [*results, {"text": "go on"}]}]
    messages = parse(contents=contents).messages
    assert [call.id for call in messages[1].tool_calls] == ["call_1", "call_2", "call_3"]
    assert [(message.role, message.tool_call_id, message.content) for message in messages[2:]] == [
        (Role.TOOL, "call_2", "1"),
        (Role.TOOL, "call_1", "2"),
        (Role.TOOL, "call_3", "3"),
        (Role.TOOL, "", "4"),
        (Role.USER, None, "go on"),
    ]


@pytest.mark.parametrize(
    ("response", "shown"),
    [
        ({"output": "text"}, "text"),
        ({"result": [1, 2]}, "[1,2]"),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"output": "a", "exit": 0}, '{"output":"a","exit":0}'),
        (None, "{}"),
        ("text", "text"),
    ],
)
def test_a_functions_answer_is_shown_as_plainly_as_it_can_be(response: Any, shown: str) -> None:
    contents = [HI, {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": response}}]}]
    assert parse(contents=contents).messages[-1].content == shown


def test_what_a_text_model_cannot_see_is_named() -> None:
    parts = [
        {"text": "look:"},
        {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
        {"file_data": {"mime_type": "text/csv", "file_uri": "gs://x"}},
        {"executableCode": {"language": "PYTHON", "code": "1+1"}},
        {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2"}},
    ]
    text = parse(contents=[{"role": "user", "parts": parts}]).messages[0].content
    assert text == "look:\n{}\n{}\n1+1\n2".format(
        "[image omitted: this model reads only text]", "[file omitted: this model reads only text]"
    )


def test_googles_schema_becomes_json_schema() -> None:
    given = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "max_length": "9"},
            "max_items": {"type": "ARRAY", "items": {"type": "INTEGER"}, "minItems": "1"},
            "either": {"any_of": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
            "kind": {"type": "STRING", "format": "enum", "enum": ["A", "B"]},
        },
        "required": ["type"],
        "propertyOrdering": ["type", "max_items"],
    }
    (tool,) = parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": given}]}]).tools
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "maxLength": 9},
            "max_items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            "either": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
            "kind": {"type": "string", "format": "enum", "enum": ["A", "B"]},
        },
        "required": ["type"],
    }


def test_the_address_says_how_to_answer() -> None:
    assert not parse().stream
    assert parse(STREAM, {"alt": "sse"}).wire["events"]
    assert parse(STREAM).stream
    assert not parse(STREAM).wire["events"]


def test_a_count_may_wrap_the_request_it_asks_about() -> None:
    assert COUNT.action is RouteAction.COUNT_TOKENS
    request = {"model": "models/m", "contents": [HI], "systemInstruction": "Be good"}
    assert len(parse(COUNT, contents=None, generateContentRequest=request).messages) == 2
    assert len(parse(COUNT).messages) == 1
    assert json.loads(DIALECT.token_count(12)) == {"totalTokens": 12}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [HI, "hi"]}, "contents[1]"),
        ({"contents": [{"role": "system", "parts": [{"text": "x"}]}]}, "contents[0].role"),
        ({"contents": [{"role": "user"}]}, "contents[0].parts"),
        ({"contents": [{"parts": [{"text": 5}]}]}, "contents[0].parts[0].text"),
        ({"contents": [said({"functionCall": {}})]}, "contents[0].parts[0].functionCall.name"),
        (
            {"contents": [said({"function_call": {"name": "f", "args": []}})]},
            "contents[0].parts[0].function_call.args",
        ),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"cached_content": "cachedContents/1"}, "cached_content"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generation_config": {"top_p": "x"}}, "generation_config.top_p"),
        ({"generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"responseLogprobs": True}}, "generationConfig.responseLogprobs"),
        ({"generationConfig": {"presencePenalty": 3}}, "generationConfig.presencePenalty"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"stopSequences": [1]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"responseMimeType": "image/png"}}, "generationConfig.responseMimeType"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"systemInstruction": 5}, "systemInstruction"),
    ],
)
def test_complaints_name_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        parse(**fields)
    assert (caught.value.refusal, caught.value.field) == (Refusal.MALFORMED, field)
    error = json.loads(DIALECT.error(caught.value).body)["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["details"][0]["fieldViolations"][0]["field"] == field


def test_the_key_may_stand_in_three_places() -> None:
    assert DIALECT.key({"x-goog-api-key": "k"}, {}) == "k"
    assert DIALECT.key({}, {"key": "k"}) == "k"
    assert DIALECT.key({"Authorization": "Bearer k"}, {}) == "k"
    assert DIALECT.key({"Authorization": "Basic k"}, {}) is None
    assert DIALECT.claims({"x-goog-api-client": "genai"})
    assert not DIALECT.claims({"Authorization": "Bearer k"})


def test_every_refusal_has_googles_shape() -> None:
    for refusal in Refusal:
        answer = DIALECT.error(RequestRefused(refusal, "why"))
        error = json.loads(answer.body)["error"]
        assert error["code"] == answer.status >= 400
        assert (error["message"], error["status"].isupper()) == ("why", True)


def test_context_overflow_is_said_in_googles_sentence() -> None:
    overflow = RequestRefused(Refusal.CONTEXT_OVERFLOW, "too long", tokens=12, limit=10)
    assert json.loads(DIALECT.error(overflow).body)["error"] == {
        "code": 400,
        "message": "The input token count (12) exceeds the maximum number of tokens allowed (10).",
        "status": "INVALID_ARGUMENT",
    }


CALLS = (ToolCall("c1", "f", '{"a": 1}'), ToolCall("c2", "g", "{}"))


def test_an_answer_has_googles_shape() -> None:
    message = Message(Role.ASSISTANT, "I look.", "hm", CALLS)
    answer = Answer(message, FinishReason.TOOL_CALLS, USAGE)
    body = json.loads(DIALECT.respond(IDENTITY, parse(**THINKING), [answer]))
    parts = body["candidates"][0]["content"]["parts"]
    assert all(part.pop("thoughtSignature") for part in parts[2:])
    assert body == {
        "candidates": [
            {
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "I look."},
                        {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}},
                        {"functionCall": {"id": "c2", "name": "g", "args": {}}},
                    ],
                },
                "index": 0,
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 10,
            "candidatesTokenCount": 5,
            "cachedContentTokenCount": 4,
            "totalTokenCount": 15,
        },
        "modelVersion": "m",
        "responseId": "r1",
    }


def test_thoughts_are_shown_only_when_asked_for() -> None:
    answer = Answer(Message(Role.ASSISTANT, "", "hm"), FinishReason.LENGTH, USAGE)
    candidate = json.loads(DIALECT.respond(IDENTITY, parse(), [answer]))["candidates"][0]
    assert (candidate["content"]["parts"], candidate["finishReason"]) == ([{"text": ""}], "MAX_TOKENS")
    assert DIALECT.stream(IDENTITY, parse(STREAM))[0].reasoning("hm") == b""
    assert b"hm" in DIALECT.stream(IDENTITY, parse(STREAM, **THINKING))[0].reasoning("hm")


def streamed(message: Message, **query: str) -> list[dict[str, Any]]:
    """The chunks of a message's stream, by either framing."""
    (encoder,) = DIALECT.stream(IDENTITY, parse(STREAM, query, **THINKING))
    raw = encoder.start() + encoder.keep_alive()
    for piece in message.reasoning or "":
        raw += encoder.reasoning(piece)
    for piece in message.content:
        raw += encoder.text(piece) + encoder.keep_alive()
    for call in message.tool_calls:
        raw += encoder.tool_call(call)
    raw += encoder.finish(FinishReason.STOP, USAGE)
    if query:
        return [json.loads(line.removeprefix("data: ")) for line in raw.decode().splitlines() if line]
    chunks: list[dict[str, Any]] = json.loads(raw)
    return chunks


def test_nothing_but_events_stands_in_an_event_stream() -> None:
    """Clients that split a stream by a pattern give up at anything else, also at a blank line."""
    (stream,) = DIALECT.stream(IDENTITY, parse(STREAM, {"alt": "sse"}))
    raw = stream.start() + stream.text("a") + stream.keep_alive() + stream.keep_alive() + stream.text("b")
    raw += stream.keep_alive() + stream.finish(FinishReason.STOP, USAGE)
    assert re.fullmatch(rb"(data: [^\n]+\n\n){3}", raw)


def test_an_error_ends_the_event_that_a_keep_alive_began() -> None:
    (stream,) = DIALECT.stream(IDENTITY, parse(STREAM, {"alt": "sse"}))
    raw = stream.keep_alive() + stream.error(RequestRefused(Refusal.ENGINE_DOWN, "busy"))
    (told,) = re.fullmatch(rb"data: ([^\n]+)\n\n", raw).groups()  # type: ignore[union-attr]
    assert json.loads(told)["error"]["status"] == "UNAVAILABLE"


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ARGUMENTS = st.one_of(
    TEXT,
    st.dictionaries(TEXT, st.one_of(TEXT, st.integers(-(2**53), 2**53), st.booleans(), st.none())).map(
        json.dumps
    ),
    st.sampled_from(['{"__raw_arguments": "x"}', "[1, 2]", "", "NaN", '{"a": NaN}', '{"a": "\\ud800"}']),
)
MESSAGES = st.builds(
    Message,
    role=st.just(Role.ASSISTANT),
    content=TEXT,
    reasoning=st.one_of(st.none(), TEXT.filter(bool)),
    tool_calls=st.lists(
        st.builds(ToolCall, st.sampled_from(["c1", "c2"]), st.just("f"), ARGUMENTS), max_size=3
    ).map(tuple),
)


def same(echoed: Message, sampled: Message) -> bool:
    def plain(call: ToolCall) -> Any:
        try:
            return json.loads(call.arguments)
        except ValueError:
            return call.arguments

    # Compared as text, for NaN equals nothing.
    return (echoed.content, repr([plain(call) for call in echoed.tool_calls])) == (
        sampled.content,
        repr([plain(call) for call in sampled.tool_calls]),
    )


@given(MESSAGES, st.sampled_from(["whole", "events", "array"]))
def test_an_echoed_answer_reads_as_it_was_sampled(message: Message, form: str) -> None:
    if form == "whole":
        answer = Answer(message, FinishReason.STOP, USAGE)
        chunks = [json.loads(DIALECT.respond(IDENTITY, parse(**THINKING), [answer]))]
    else:
        chunks = streamed(message, **({"alt": "sse"} if form == "events" else {}))
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
    assert chunks[-1]["usageMetadata"]["totalTokenCount"] == 15
    contents: list[dict[str, Any]] = [HI, *(chunk["candidates"][0]["content"] for chunk in chunks)]
    _, echoed = parse(contents=contents).messages
    assert same(echoed, message)
    assert echoed.reasoning == message.reasoning
    for content in contents:
        content["parts"] = [part for part in content["parts"] if not part.get("thought")]
        for part in content["parts"]:
            part.get("functionCall", {}).pop("id", None)
    _, echoed = parse(contents=contents).messages
    assert same(echoed, message)
    # What a client drops comes back in the signatures of its calls.
    assert [call.id for call in echoed.tool_calls] == [call.id for call in message.tool_calls]
    assert echoed.reasoning == (message.reasoning if message.tool_calls else None)


def test_a_streams_error_is_one_the_official_clients_recognise() -> None:
    failure = RequestRefused(Refusal.ENGINE_DOWN, "busy")
    (events,) = DIALECT.stream(IDENTITY, parse(STREAM, {"alt": "sse"}))
    assert json.loads(events.error(failure))["error"]["status"] == "UNAVAILABLE"
    (array,) = DIALECT.stream(IDENTITY, parse(STREAM))
    told = json.loads(array.start() + array.text("a") + array.error(failure))
    assert told[-1]["error"]["code"] == 503


def test_models_are_told_in_googles_shape() -> None:
    (listed,) = json.loads(DIALECT.models("a/b", 100, 7))["models"]
    assert listed == json.loads(DIALECT.model("a/b", 100, 7))
    assert (listed["name"], listed["inputTokenLimit"]) == ("models/a/b", 100)
