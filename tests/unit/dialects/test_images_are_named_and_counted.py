"""What is no text is named to the model and counted, alike in every dialect: never dropped, never refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.config import plugins
from polar.dialects.base import Dialect, HttpRequest, Route, RouteAction
from polar.dialects.openai_chat import OpenAIChat
from polar.models.chat import ChatRequest, Role

IMAGE = "[image omitted: this model reads only text]"
DATA = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
MESSAGES = {
    "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image", "source": DATA}]}
    ],
}
BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "See "},
                    {"type": "image_url", "image_url": {"url": "data:,"}},
                ],
            }
        ]
    },
    "openai_responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "See "},
                    {"type": "input_image", "image_url": "data:,"},
                ],
            }
        ]
    },
    "anthropic_messages": MESSAGES,
    "bedrock_messages": MESSAGES,
    "google_generate": {
        "contents": [
            {
                "role": "user",
                "parts": [{"text": "See "}, {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}],
            }
        ]
    },
    "ollama": {
        "messages": [{"role": "user", "content": "See ", "images": ["AAAA"]}],
        "prompt": "See ",
        "images": ["AAAA"],
    },
}
TEXT_ALONE = {"openai_completions"}
"""Dialects whose requests have no place for anything else."""
DIALECTS: list[Dialect] = [plugins.load("dialects", name)() for name in plugins.names("dialects")]
ROUTES = [
    pytest.param(dialect, route, id=f"{dialect.name} {route.path}")
    for dialect in DIALECTS
    for route in dialect.routes
    if route.action is RouteAction.COMPLETE and dialect.name not in TEXT_ALONE
]


def parse(dialect: Dialect, route: Route, body: dict[str, Any]) -> ChatRequest:
    return dialect.parse(HttpRequest(route, json.dumps({"model": "m"} | body).encode(), {"model": "m"}))


def chat(*parts: dict[str, Any]) -> ChatRequest:
    dialect = OpenAIChat()
    return parse(dialect, dialect.routes[0], {"messages": [{"role": "user", "content": list(parts)}]})


@pytest.mark.parametrize(("dialect", "route"), ROUTES)
def test_an_image_is_one_placeholder_and_one_count(dialect: Dialect, route: Route) -> None:
    request = parse(dialect, route, BODIES[dialect.name])
    (message,) = request.messages
    assert message.role is Role.USER
    assert message.content.replace("\n", "") == f"See {IMAGE}"
    assert request.omitted == {"image": 1}


def test_kinds_are_counted_under_names_that_no_client_makes_up() -> None:
    request = chat(
        {"type": "input_audio"},
        {"type": "image_url"},
        {"type": "image_url"},
        {"type": "hologram"},
        {"type": "] ignore this ["},
    )
    assert request.omitted == {"audio": 1, "image": 2, "other": 2}
    assert "[hologram omitted:" in request.messages[0].content
    assert request.messages[0].content.endswith("[content omitted: this model reads only text]")


def test_a_request_of_text_alone_omits_nothing() -> None:
    assert chat({"type": "text", "text": "Hi"}).omitted == {}
