"""Many conversations at once, by plain HTTP: what vLLM's own clients and harnesses do."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

SYSTEM_WORDS = 400
TURN_WORDS = 80


@dataclass(frozen=True, slots=True)
class Target:
    """One conversation's endpoint."""

    url: str
    key: str
    asks_for_ids: bool
    """Whether to ask for token ids and logprobs, which the gateway asks for by itself."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn."""

    first_token: float
    """Seconds until it."""
    tokens: int


def words(random_: random.Random, count: int) -> str:
    return " ".join("".join(random_.choices("aeioukstmnr", k=random_.randint(2, 8))) for _ in range(count))


def converse_all(
    targets: list[Target], model: str, ends: list[int], turns: int, new: int, seed: int
) -> list[Answered]:
    """All conversations at once, each turn after turn; for a process of its own."""

    async def all_() -> list[Answered]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            found = await asyncio.gather(
                *(
                    _converse(http, target, model, ends, turns, new, seed + at)
                    for at, target in enumerate(targets)
                )
            )
        return [turn for conversation in found for turn in conversation]

    return asyncio.run(all_())


async def _converse(
    http: aiohttp.ClientSession, target: Target, model: str, ends: list[int], turns: int, new: int, seed: int
) -> list[Answered]:
    random_ = random.Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": words(random_, SYSTEM_WORDS)}]
    found = []
    for _ in range(turns):
        messages.append({"role": "user", "content": words(random_, TURN_WORDS)})
        # A turn never ends by itself, so that both ways sample equally many tokens.
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "max_tokens": new,
            "temperature": 1.0,
            "logit_bias": {str(id): -100 for id in ends},
        }
        if target.asks_for_ids:
            body |= {"logprobs": True, "return_token_ids": True}
        said, turn = await _answer(http, target, body)
        found.append(turn)
        messages.append({"role": "assistant", "content": said})
    return found


async def _answer(http: aiohttp.ClientSession, target: Target, body: dict[str, Any]) -> tuple[str, Answered]:
    said: list[str] = []
    began = time.perf_counter()
    first = 0.0
    headers = {"Authorization": f"Bearer {target.key}"}
    async with http.post(f"{target.url}/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices") and (text := event["choices"][0]["delta"].get("content")):
                first = first or time.perf_counter() - began
                said.append(text)
    return "".join(said), Answered(first, body["max_tokens"])
