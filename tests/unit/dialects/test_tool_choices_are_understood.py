"""A tool choice means the same in every dialect, and a wrong one is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.dialects.anthropic_messages import AnthropicMessages
from polar.dialects.base import Dialect, HttpRequest, Refusal, RequestRefused
from polar.dialects.google_generate import GoogleGenerate
from polar.dialects.openai_chat import OpenAIChat
from polar.dialects.openai_responses import OpenAIResponses
from polar.models.chat import ChatRequest, ToolChoice, ToolUse

ANY = ToolChoice(ToolUse.REQUIRED)
NONE = ToolChoice(ToolUse.NONE)
ONLY_F = ToolChoice(ToolUse.REQUIRED, ("f",))
ONE_AT_A_TIME = ToolChoice(parallel=False)

CHAT = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": name}} for name in "fg"],
}
RESPONSES = {
    "model": "m",
    "input": "hi",
    "tools": [
        {"type": "function", "name": "f"},
        {"type": "custom", "name": "g"},
        {"type": "local_shell"},
        {"type": "web_search"},
    ],
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 9,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [
        {"name": "f", "input_schema": {}},
        {"name": "g", "input_schema": {}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
}
GOOGLE = {
    "contents": [{"parts": [{"text": "hi"}]}],
    "tools": [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}],
}


def parse(dialect: Dialect, body: dict[str, Any]) -> ChatRequest:
    return dialect.parse(HttpRequest(dialect.routes[0], json.dumps(body).encode(), {"model": "m"}))


def chat(**fields: Any) -> ChatRequest:
    return parse(OpenAIChat(), CHAT | fields)


def responses(**fields: Any) -> ChatRequest:
    return parse(OpenAIResponses(), RESPONSES | fields)


def anthropic(**fields: Any) -> ChatRequest:
    return parse(AnthropicMessages(), ANTHROPIC | fields)


def google(**calling: Any) -> ChatRequest:
    return parse(GoogleGenerate(), GOOGLE | {"toolConfig": {"functionCallingConfig": calling}})


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto"}, ToolChoice()),
        ({"tool_choice": "none"}, NONE),
        ({"tool_choice": "required"}, ANY),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, ONLY_F),
        ({"tool_choice": allowed("auto", "f")}, ToolChoice(names=("f",))),
        ({"tool_choice": allowed("required", "f")}, ONLY_F),
        ({"tool_choice": allowed("required", "g", "f")}, ANY),
        ({"parallel_tool_calls": False}, ONE_AT_A_TIME),
        ({"parallel_tool_calls": True}, ToolChoice()),
        ({"function_call": "none"}, NONE),
        ({"function_call": {"name": "f"}}, ONLY_F),
    ],
)
def test_openai_chat(fields: dict[str, Any], expected: ToolChoice) -> None:
    request = chat(**fields)
    assert request.tool_choice == expected
    assert [tool.name for tool in request.tools] == ["f", "g"], "what is offered stands in the prompt"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tool_choice": "none"}, NONE),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ToolChoice(ToolUse.REQUIRED, (), False)),
        ({"tool_choice": {"type": "function", "name": "f"}}, ONLY_F),
        ({"tool_choice": {"type": "custom", "name": "g"}}, ToolChoice(ToolUse.REQUIRED, ("g",))),
        ({"tool_choice": {"type": "local_shell"}}, ToolChoice(ToolUse.REQUIRED, ("local_shell",))),
        ({"tool_choice": {"type": "web_search"}}, ToolChoice()),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "custom", "name": "g"}],
                }
            },
            ToolChoice(names=("g",)),
        ),
    ],
)
def test_openai_responses(fields: dict[str, Any], expected: ToolChoice) -> None:
    request = responses(**fields)
    assert request.tool_choice == expected
    assert [tool.name for tool in request.tools] == ["f", "g", "local_shell"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ONE_AT_A_TIME),
        ({"type": "any"}, ANY),
        ({"type": "tool", "name": "f"}, ONLY_F),
        ({"type": "none"}, NONE),
        ({"type": "tool", "name": "web_search"}, ToolChoice()),
    ],
)
def test_anthropic(choice: Any, expected: ToolChoice) -> None:
    request = anthropic(tool_choice=choice)
    assert request.tool_choice == expected
    assert [tool.name for tool in request.tools] == ["f", "g"]


@pytest.mark.parametrize(
    ("calling", "expected"),
    [
        ({}, ToolChoice()),
        ({"mode": "AUTO"}, ToolChoice()),
        ({"mode": "NONE"}, NONE),
        ({"mode": "any"}, ANY),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, ONLY_F),
        ({"mode": "VALIDATED", "allowed_function_names": ["f"]}, ToolChoice(names=("f",))),
    ],
)
def test_google(calling: dict[str, Any], expected: ToolChoice) -> None:
    request = google(**calling)
    assert request.tool_choice == expected
    assert [tool.name for tool in request.tools] == ["f", "g"]


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda: chat(tool_choice="some"), "tool_choice"),
        (lambda: chat(tool_choice=5), "tool_choice"),
        (lambda: chat(tool_choice={"type": "dance"}), "tool_choice.type"),
        (lambda: chat(tool_choice={"type": "function"}), "tool_choice.function"),
        (
            lambda: chat(tool_choice={"type": "function", "function": {"name": "h"}}),
            "tool_choice.function.name",
        ),
        (lambda: chat(tool_choice=allowed("auto", "h")), "tool_choice.allowed_tools.tools"),
        (lambda: chat(tool_choice=allowed("some", "f")), "tool_choice.allowed_tools.mode"),
        (lambda: chat(tools=None, tool_choice="required"), "tool_choice"),
        (lambda: chat(parallel_tool_calls="no"), "parallel_tool_calls"),
        (lambda: responses(tool_choice="some"), "tool_choice"),
        (lambda: responses(tool_choice={"type": "function", "name": "h"}), "tool_choice"),
        (lambda: responses(tool_choice={"type": "computer_use"}), "tool_choice"),
        (lambda: responses(tools=[], tool_choice="required"), "tool_choice"),
        (lambda: anthropic(tool_choice={"type": "tool"}), "tool_choice.name"),
        (lambda: anthropic(tool_choice={"type": "tool", "name": "h"}), "tool_choice.name"),
        (lambda: anthropic(tools=[], tool_choice={"type": "any"}), "tool_choice.type"),
        (lambda: google(mode="SOME"), "toolConfig.functionCallingConfig.mode"),
        (
            lambda: google(mode="ANY", allowedFunctionNames=["h"]),
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        (
            lambda: google(mode="ANY", allowedFunctionNames="f"),
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
    ],
)
def test_a_wrong_choice_is_refused_by_its_field(ask: Any, field: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        ask()
    assert caught.value.refusal is Refusal.MALFORMED
    assert caught.value.field == field
