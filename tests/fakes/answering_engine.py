"""An engine whose answer follows from the question and the seed, so that two runs can be compared."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import VllmWire
from tests.listening import listening

WORDS = ("yes", "yes indeed", "no", "perhaps", "yes", "never")


def by_seed(body: dict[str, Any]) -> Said:
    """One of a few words, chosen by everything that the engine was asked."""
    asked = f"{body.get('seed')} {body['messages'][-1]['content']}"
    return Said(WORDS[zlib.crc32(asked.encode()) % len(WORDS)])


@dataclass
class AnsweringEngine(VllmWire):
    """Speaks vLLM's chat wire, with tokens where they are asked for."""

    answer: Callable[[dict[str, Any]], Said | web.Response] = by_seed
    questions: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """How long it takes to answer."""

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.questions.append(body["messages"][-1]["content"])
        said = self.answer(body)
        if isinstance(said, web.Response):
            return said
        await asyncio.sleep(self.seconds)
        self.answers = [said]
        return await super().completions(request)


@asynccontextmanager
async def answering_engine(
    answer: Callable[[dict[str, Any]], Said | web.Response] = by_seed, *, seconds: float = 0.0
) -> AsyncIterator[AnsweringEngine]:
    engine = AnsweringEngine([], answer=answer, seconds=seconds)
    app = web.Application()
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/v1/chat/completions", engine.completions)
    app.router.add_post("/tokenize", engine.tokenize)
    async with listening(app) as engine.url:
        yield engine
