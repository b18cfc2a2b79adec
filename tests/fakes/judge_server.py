"""A model that judges, over OpenAI's chat completions: answers from a script and keeps what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.listening import listening

Answer = str | tuple[int, str] | Callable[[dict[str, Any]], str | tuple[int, str]]


@dataclass
class JudgeServer:
    """The n-th request gets the n-th answer, the last one repeats: a text, a status with a body, or a
    function that makes either of the request."""

    answers: list[Answer]
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        if callable(answer):
            answer = answer(self.asked[-1])
        if isinstance(answer, tuple):
            return web.Response(status=answer[0], text=answer[1])
        message = {"role": "assistant", "content": answer}
        return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@asynccontextmanager
async def judging(*answers: Answer) -> AsyncIterator[JudgeServer]:
    server = JudgeServer(list(answers))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    async with listening(app) as url:
        server.url = f"{url}/v1"
        yield server
