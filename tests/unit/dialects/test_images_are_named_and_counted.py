"""What is no text is named to the model and counted, alike in every dialect: never dropped, never refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import Dialect, HttpRequest, RouteAction
from polar.dialects.google_generate import GoogleGenerate
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses
from polar.models.chat import ChatRequest, Role

IMAGE = "[image omitted: this model reads only text]"
DATA = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


def parse(dialect: Dialect, body: dict[str, Any]) -> ChatRequest:
    route = next(route for route in dialect.routes if route.action is RouteAction.COMPLETE)
    return dialect.parse(HttpRequest(route, json.dumps({"model": "m"} | body).encode(), {"model": "m"}))


def chat(*parts: dict[str, Any]) -> ChatRequest:
    return parse(OpenAIChat(), {"messages": [{"role": "user", "content": list(parts)}]})


@pytest.mark.parametrize(
    "request_",
    [
        chat({"type": "text", "text": "See "}, {"type": "image_url", "image_url": {"url": "data:,"}}),
        parse(
            OpenAIResponses(),
            {
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
        ),
        parse(
            AnthropicMessages(),
            {
                "max_tokens": 9,
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "See "}, {"type": "image", "source": DATA}],
                    }
                ],
            },
        ),
        parse(
            GoogleGenerate(),
            {
                "contents": [
                    {
                        "role": "user",
                        "parts": [
                            {"text": "See "},
                            {"inlineData": {"mimeType": "image/png", "data": "AAAA"}},
                        ],
                    }
                ]
            },
        ),
    ],
    ids=["chat", "responses", "messages", "generate"],
)
def test_an_image_is_one_placeholder_and_one_count(request_: ChatRequest) -> None:
    (message,) = request_.messages
    assert message.role is Role.USER
    assert message.content.replace("\n", "") == f"See {IMAGE}"
    assert request_.omitted == {"image": 1}


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
