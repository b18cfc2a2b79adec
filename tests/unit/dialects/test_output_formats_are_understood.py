"""JSON output and token biases mean the same in every dialect; a schema that is none is refused at once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import Dialect, HttpRequest, Refusal, RequestRefused
from polar.dialects.google_generate import GoogleGenerate
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses
from polar.models.chat import ChatRequest, JsonOutput

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
USER = [{"role": "user", "content": "hi"}]


def parse(dialect: Dialect, body: dict[str, Any]) -> ChatRequest:
    return dialect.parse(HttpRequest(dialect.routes[0], json.dumps(body).encode(), {"model": "m"}))


def chat(**fields: Any) -> ChatRequest:
    return parse(OpenAIChat(), {"model": "m", "messages": USER} | fields)


def chat_schema(schema: Any) -> ChatRequest:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return chat(response_format=wanted)


def responses(format_: Any) -> ChatRequest:
    return parse(OpenAIResponses(), {"model": "m", "input": "hi", "text": {"format": format_}})


def anthropic(**fields: Any) -> ChatRequest:
    return parse(AnthropicMessages(), {"model": "m", "max_tokens": 9, "messages": USER} | fields)


def google(**config: Any) -> ChatRequest:
    body = {"contents": [{"parts": [{"text": "hi"}]}], "generationConfig": config}
    return parse(GoogleGenerate(), body)


def test_each_dialect_asks_for_json_in_its_own_words() -> None:
    named = JsonOutput(SCHEMA, "n")
    assert chat_schema(SCHEMA).output == named
    assert responses({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}).output == named
    any_object = JsonOutput({"type": "object"})
    assert chat(response_format={"type": "json_object"}).output == any_object
    assert responses({"type": "json_object"}).output == any_object
    wanted = {"type": "json_schema", "schema": SCHEMA}
    assert anthropic(output_config={"format": wanted}).output == JsonOutput(SCHEMA)
    assert anthropic(output_format=wanted).output == JsonOutput(SCHEMA)
    of_google = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}, "required": ["a"]}
    as_json: dict[str, Any] = {"responseMimeType": "application/json"}
    assert google(**as_json, responseSchema=of_google).output == JsonOutput(SCHEMA)
    assert google(**as_json, responseJsonSchema=SCHEMA).output == JsonOutput(SCHEMA)
    assert google(response_mime_type="application/json", response_schema=of_google).output == JsonOutput(
        SCHEMA
    )
    assert google(**as_json).output == JsonOutput()


def test_free_text_is_what_nobody_asks_for() -> None:
    for request in (
        chat(),
        chat(response_format={"type": "text"}),
        responses({"type": "text"}),
        anthropic(output_config={"effort": "low"}),
        google(responseMimeType="text/plain"),
    ):
        assert request.output is None


def test_biases_are_read_by_token_id() -> None:
    assert chat(logit_bias={"5": -100, "17": 0.5}).sampling.logit_bias == ((5, -100.0), (17, 0.5))
    assert chat(logit_bias={}).sampling.logit_bias == ()


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda: chat(response_format="json"), "response_format"),
        (lambda: chat(response_format={"type": "xml"}), "response_format.type"),
        (lambda: chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
        (lambda: chat_schema(None), "response_format.json_schema.schema"),
        (lambda: chat_schema({"type": "strin"}), "response_format.json_schema.schema.type"),
        (
            lambda: chat_schema({"properties": {"a": {"items": 5}}}),
            "response_format.json_schema.schema.properties.a.items",
        ),
        (lambda: chat_schema({"properties": []}), "response_format.json_schema.schema.properties"),
        (lambda: chat_schema({"required": "a"}), "response_format.json_schema.schema.required"),
        (lambda: chat_schema({"enum": []}), "response_format.json_schema.schema.enum"),
        (lambda: chat_schema({"anyOf": [True, 5]}), "response_format.json_schema.schema.anyOf[1]"),
        (lambda: chat_schema({"$ref": "#/$defs/a"}), "response_format.json_schema.schema.$ref"),
        (lambda: chat_schema({"$ref": "http://a.b/c"}), "response_format.json_schema.schema.$ref"),
        (lambda: chat(logit_bias=[1]), "logit_bias"),
        (lambda: chat(logit_bias={"a": 1}), "logit_bias.a"),
        (lambda: chat(logit_bias={"-1": 1}), "logit_bias.-1"),
        (lambda: chat(logit_bias={"99999999999": 1}), "logit_bias.99999999999"),
        (lambda: chat(logit_bias={"1": 101}), "logit_bias.1"),
        (lambda: chat(logit_bias={"1": "a"}), "logit_bias.1"),
        (lambda: responses({"type": "json_schema", "name": "n"}), "text.format.schema"),
        (lambda: responses({"type": "xml"}), "text.format.type"),
        (lambda: anthropic(output_config={"format": {"type": "json"}}), "output_config.format.type"),
        (lambda: anthropic(output_format={"type": "json_schema"}), "output_format.schema"),
        (lambda: google(responseMimeType="text/x.enum"), "generationConfig.responseMimeType"),
        (lambda: google(responseSchema={"type": "STRING"}), "generationConfig.response_mime_type"),
        (
            lambda: google(responseMimeType="application/json", responseSchema={"type": "STRIN"}),
            "generationConfig.responseSchema.type",
        ),
    ],
)
def test_a_wrong_format_is_refused_by_its_field(ask: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        ask()
    assert caught.value.refusal is Refusal.MALFORMED
    assert caught.value.field == field


def test_a_recursive_schema_is_a_schema() -> None:
    tree = {
        "$defs": {"t": {"type": "object", "properties": {"t": {"$ref": "#/$defs/t"}}}},
        "$ref": "#/$defs/t",
    }
    assert chat_schema(tree).output == JsonOutput(tree, "n")
