"""Whatever bytes come, Anthropic's dialect reads a request or refuses it as malformed; nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import HttpRequest, Refusal, RequestRefused, Route
from polar.gateway.conversation import Conversations
from polar.models.chat import ChatRequest

DIALECT = AnthropicMessages()
COMPLETE, COUNT = DIALECT.routes[:2]

VALID: dict[str, Any] = {
    "model": "m",
    "max_tokens": 10,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "hi"}, {"type": "image", "source": {"type": "url"}},
            {"type": "document", "title": "t", "source": {"type": "text", "data": "d"}},
            {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "r"}]}]},
        {"role": "system", "content": "now"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": [1, 2.5, None]}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": [
                {"type": "text", "text": "ok"}, {"type": "tool_reference", "tool_name": "g"}]}]},
    ],
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object"}},
        {"type": "custom", "name": "g", "input_schema": {}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["END"],
    "temperature": 1.0, "top_p": 0.9, "top_k": 5, "stream": True, "metadata": {"user_id": "u"},
}  # fmt: skip

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
"""With lone surrogates, infinities and integers of any size."""


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of every value inside a document."""
    below: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        below = list(value.items())
    elif isinstance(value, list):
        below = list(enumerate(value))
    return [path, *(place for key, inner in below for place in places(inner, (*path, key)))]


PLACES = places(VALID)[1:]


def changed(path: tuple[str | int, ...], new: Any, *, absent: bool) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(VALID))
    inside: Any = copy
    for step in path[:-1]:
        inside = inside[step]
    if absent:
        del inside[path[-1]]
    else:
        inside[path[-1]] = new
    return copy


def read(body: bytes, route: Route = COMPLETE) -> None:
    """Parse; what is accepted must be usable by the gateway."""
    refused: RequestRefused | None = None
    try:
        request = DIALECT.parse(HttpRequest(route, body))
    except RequestRefused as error:
        refused = error
    if refused is not None:
        assert refused.refusal is Refusal.MALFORMED
        assert DIALECT.error(refused).status == 400
        return
    assert isinstance(request, ChatRequest)
    assert request.messages
    Conversations().find(request.messages, request.tools)


def test_the_valid_body_is_accepted() -> None:
    assert len(DIALECT.parse(HttpRequest(COMPLETE, json.dumps(VALID).encode())).messages) == 5


@given(st.sampled_from([COMPLETE, COUNT]), junk)
def test_any_json_is_read_or_refused(route: Route, value: Any) -> None:
    read(json.dumps(value).encode(), route)


@given(st.sampled_from(PLACES), junk, st.booleans())
def test_one_wrong_value_is_read_or_refused(place: tuple[str | int, ...], value: Any, absent: bool) -> None:
    read(json.dumps(changed(place, value, absent=absent)).encode())


@given(st.dictionaries(st.sampled_from(sorted(VALID)), junk))
def test_wrong_fields_are_read_or_refused(fields: dict[str, Any]) -> None:
    read(json.dumps(VALID | fields).encode())


@given(st.binary(max_size=64))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    read(body)


@given(st.integers(0, len(json.dumps(VALID))), st.binary(max_size=4))
def test_a_cut_or_corrupted_body_is_read_or_refused(at: int, noise: bytes) -> None:
    body = json.dumps(VALID).encode()
    read(body[:at] + noise)
    read(body[:at] + noise + body[at:])


@pytest.mark.parametrize("levels", [100, 200, 250, 251, 252, 253, 254, 255, 500, 1020, 5000, 200_000])
@pytest.mark.parametrize(("opening", "closing"), [('{"a":', "}"), ("[", "]")])
def test_deep_nesting_is_read_or_refused(levels: int, opening: str, closing: str) -> None:
    deep = opening * levels + "1" + closing * levels
    for place in PLACES:
        if place[-1] in ("a", "input_schema", "content", "system", "metadata"):
            text = json.dumps(changed(place, "DEEP", absent=False)).replace('"DEEP"', deep)
            read(text.encode())
