"""Whatever the body, Google's dialect answers with a chat request or a refusal, never another error."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.base import HttpRequest, RequestRefused
from polar.dialects.google_generate import GoogleGenerate
from polar.models.chat import ChatRequest

DIALECT = GoogleGenerate()
POSTS = [route for route in DIALECT.routes if route.method == "POST"]
VALID: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be good"}]},
    "contents": [
        {"role": "user", "parts": [{"text": "hi"}, {"inlineData": {"mimeType": "image/png", "data": ""}}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True, "thoughtSignature": "cG9sYXI6aG0="},
                {"functionCall": {"id": "c", "name": "f", "args": {"a": [1]}}},
                {"executableCode": {"code": "1"}},
            ],
        },
        {
            "role": "function",
            "parts": [{"functionResponse": {"name": "f", "response": {"output": {}}, "parts": [{}]}}],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "f", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}},
                {"name": "g", "parametersJsonSchema": {"type": "object", "properties": {}}},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY"}},
    "generationConfig": {
        "temperature": 1,
        "topK": 4,
        "stopSequences": ["x"],
        "thinkingConfig": {"includeThoughts": True},
    },
}
JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(["model", ""]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(st.text(max_size=6), st.sampled_from(["contents", "parts", "text", "role", "items"])),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((value, key), *_places(inner))]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    body = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        container, key = draw(st.sampled_from(_places(body)))
        container[key] = draw(JSON)
    return body


def survives(body: bytes, route: int) -> None:
    request = HttpRequest(POSTS[route % len(POSTS)], body, {"model": "m"})
    try:
        outcome: ChatRequest | RequestRefused = DIALECT.parse(request)
    except RequestRefused as refused:
        outcome = refused
    assert isinstance(outcome, ChatRequest) or 400 <= DIALECT.error(outcome).status < 500


ROUTES = st.integers(0, len(POSTS) - 1)


@given(mutated(), ROUTES)
def test_a_mutated_request(body: dict[str, Any], route: int) -> None:
    survives(json.dumps(body).encode(), route)


@given(JSON, ROUTES)
def test_any_json(body: Any, route: int) -> None:
    survives(json.dumps(body).encode(), route)
    survives(json.dumps({"contents": body, "tools": body, "systemInstruction": body}).encode(), route)


@given(st.binary(max_size=60), ROUTES)
def test_any_bytes(body: bytes, route: int) -> None:
    survives(body, route)


@given(st.integers(0, 1200), ROUTES)
def test_a_body_cut_short_or_nested_deeply(length: int, route: int) -> None:
    survives(json.dumps(VALID).encode()[:length], route)
    nested = '{"a":' * length + "1" + "}" * length
    for role, part, place in (("model", "functionCall", "args"), ("user", "functionResponse", "response")):
        call = f'{{"{part}": {{"name": "f", "{place}": {nested}}}}}'
        survives(f'{{"contents": {{"role": "{role}", "parts": {call}}}}}'.encode(), route)
    for name in ("parameters", "parametersJsonSchema"):
        tools = f'{{"functionDeclarations": {{"name": "f", "{name}": {nested}}}}}'
        survives(f'{{"contents": {{"parts": {{"text": "x"}}}}, "tools": {tools}}}'.encode(), route)


def test_a_lone_surrogate_is_no_error() -> None:
    survives(rb'{"contents": [{"parts": [{"text": "\ud800"}]}]}', 0)
