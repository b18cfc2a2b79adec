"""Tools that come again are those that were read before; wrong ones are complained of every time."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar.config import plugins
from polar.dialects.base import HttpRequest, RequestRefused, RouteAction
from polar.models.chat import ChatRequest

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS: dict[str, Any] = {
    "openai_chat": [{"type": "function", "function": {"name": "ls", "parameters": SCHEMA}}],
    "anthropic_messages": [{"name": "ls", "input_schema": SCHEMA}],
    "google_generate": [{"functionDeclarations": [{"name": "ls", "parameters": SCHEMA}]}],
}
SAID: dict[str, Any] = {
    "openai_chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "anthropic_messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "google_generate": {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
}


def parsed(name: str, tools: Any) -> ChatRequest:
    dialect = plugins.load("dialects", name)()
    route = next(route for route in dialect.routes if route.action is RouteAction.COMPLETE)
    body = orjson.dumps({"model": "m", "tools": tools} | SAID[name])
    request: ChatRequest = dialect.parse(HttpRequest(route, body, {"model": "m"}))
    return request


@pytest.mark.parametrize("name", TOOLS)
def test_the_same_tools_are_the_same_objects(name: str) -> None:
    first, again = parsed(name, TOOLS[name]), parsed(name, TOOLS[name])
    assert [tool.name for tool in first.tools] == ["ls"]
    assert again.tools is first.tools


@pytest.mark.parametrize("name", TOOLS)
def test_other_tools_are_other_objects(name: str) -> None:
    other = orjson.loads(orjson.dumps(TOOLS[name]).replace(b'"ls"', b'"cat"'))
    assert [tool.name for tool in parsed(name, TOOLS[name]).tools] == ["ls"]
    assert [tool.name for tool in parsed(name, other).tools] == ["cat"]


def test_a_wrong_tool_is_named_each_time() -> None:
    wrong = [*TOOLS["openai_chat"], {"type": "function", "function": {"name": 7}}]
    for _ in range(2):
        with pytest.raises(RequestRefused) as caught:
            parsed("openai_chat", wrong)
        assert caught.value.field == "tools[1].function.name"


def test_tools_beyond_all_measure_are_read_and_not_kept() -> None:
    huge = orjson.loads(orjson.dumps(TOOLS["openai_chat"]))
    huge[0]["function"]["description"] = "x" * 200_000
    first, again = parsed("openai_chat", huge), parsed("openai_chat", huge)
    assert first.tools == again.tools
    assert first.tools is not again.tools
