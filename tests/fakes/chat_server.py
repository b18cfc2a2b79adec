"""An OpenAI chat server that streams a fixed script of answers and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.listening import listening


@dataclass
class Asked:
    """One request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class ChatServer:
    """Answers the n-th request with the n-th message; requests beyond the script get a 500."""

    script: list[dict[str, Any]]
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(Asked(request.path, dict(request.headers), await request.json()))
        if len(self.asked) > len(self.script):
            return web.json_response({"error": {"message": "the script is over"}}, status=500)
        message = self.script[len(self.asked) - 1]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        finish = "tool_calls" if "tool_calls" in message else "stop"
        for delta, reason in (({"role": "assistant", **message}, None), ({}, finish)):
            await response.write(b"data: " + json.dumps(self._chunk(delta, reason)).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{len(self.asked)}",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15} if reason else None,
        }


def tool_call(name: str, **arguments: Any) -> dict[str, Any]:
    """A message that calls one tool."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "content": None,
        "tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}],
    }


@asynccontextmanager
async def chat_server(*script: dict[str, Any]) -> AsyncIterator[ChatServer]:
    server = ChatServer(list(script))
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", server.answer)
    async with listening(app) as server.url:
        yield server
