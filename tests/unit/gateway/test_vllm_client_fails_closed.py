"""The engine client passes on tokens only with their ids and logprobs, and aborts when closed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from polar.engines import http
from polar.engines.base import (
    ContextOverflow,
    EngineDown,
    EngineError,
    GenerateRequest,
    ModelInfo,
    TokenChunk,
)
from polar.engines.vllm import VllmEngine
from polar.models.chat import FinishReason, Sampling
from tests.fakes.vllm_wire import event, usage, vllm_wire

REQUEST = GenerateRequest(
    "r1", [1, 2, 3], Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=9), (2,)
)


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_BACKOFF_SECONDS", 0.001)


async def generated(url: str, version: int = 0) -> list[TokenChunk]:
    engine = VllmEngine(url)
    engine.policy_version = version
    try:
        return [chunk async for chunk in engine.generate(REQUEST)]
    finally:
        await engine.close()


async def test_tokens_come_with_logprobs_version_and_cache_hits() -> None:
    first = event([5, 6], [-0.5, -1.0], prompt_token_ids=[1] * 100_000)
    async with vllm_wire([first, event([2], [-0.1], "stop"), usage(3, 2), "[DONE]"]) as wire:
        chunks = await generated(wire.url, version=4)
        assert chunks == [
            TokenChunk([5, 6], [-0.5, -1.0], 4),
            TokenChunk([2], [-0.1], 4, FinishReason.STOP, cached_tokens=2),
        ]
    body = wire.bodies[0]
    assert body["prompt"] == [1, 2, 3]
    assert body["stop_token_ids"] == [2]
    assert (body["return_token_ids"], body["logprobs"], body["stream"]) == (True, 1, True)
    assert (body["model"], body["seed"], body["max_tokens"], body["top_k"]) == ("small", 5, 9, 0)


async def test_the_servers_own_version_is_taken() -> None:
    answer = [event([5], [-1.0], policy_version=7), event([2], [-1.0], "length", policy_version=8), "[DONE]"]
    async with vllm_wire(answer) as wire:
        assert [chunk.policy_version for chunk in await generated(wire.url)] == [7, 8]


@pytest.mark.parametrize(
    "answer",
    [
        [event(None, [-1.0], "stop"), "[DONE]"],
        [event([5], None, "stop"), "[DONE]"],
        [event([5, 6], [-1.0], "stop"), "[DONE]"],
        [event([5], [None], "stop"), "[DONE]"],  # type: ignore[list-item]
        [event([5], [-1.0]), "[DONE]"],
        [event([5], [-1.0])],
        [event([5], [-1.0], "stop"), usage(2), "[DONE]"],
        [event([5], [-1.0], "abort"), "[DONE]"],
        [{"error": {"message": "CUDA error", "code": 500}}],
        ["not json"],
    ],
)
async def test_a_stream_without_exact_tokens_is_an_error(answer: list[object]) -> None:
    async with vllm_wire(answer) as wire:
        with pytest.raises(EngineError):
            await generated(wire.url)


async def test_an_overlong_prompt_is_a_context_overflow() -> None:
    error = {"error": {"message": "This model's maximum context length is 512 tokens.", "code": 400}}
    async with vllm_wire((400, error)) as wire:
        with pytest.raises(ContextOverflow):
            await generated(wire.url)
        assert len(wire.bodies) == 1


async def test_a_busy_engine_is_asked_again() -> None:
    busy = (503, {"error": {"message": "loading"}})
    async with vllm_wire(busy, busy, [event([2], [-1.0], "stop"), "[DONE]"]) as wire:
        assert len(await generated(wire.url)) == 1
        assert len(wire.bodies) == 3


async def test_an_engine_that_stays_busy_or_absent_is_down() -> None:
    async with vllm_wire((503, {"error": {"message": "loading"}})) as wire:
        with pytest.raises(EngineDown, match="loading"):
            await generated(wire.url)
        assert len(wire.bodies) == http.ATTEMPTS
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(EngineDown, match="cannot be reached"):
            await generated(f"http://127.0.0.1:{unused.getsockname()[1]}")


async def test_closing_the_iterator_closes_the_connection() -> None:
    async with vllm_wire([event([5], [-1.0]), asyncio.Event()]) as wire:
        engine = VllmEngine(wire.url)
        chunks = engine.generate(REQUEST)
        assert (await anext(chunks)).ids == [5]
        await chunks.aclose()
        await wire.disconnected.wait()
        await engine.close()


async def test_the_model_is_described() -> None:
    async with vllm_wire([]) as wire:
        engine = VllmEngine(wire.url + "/v1/")
        assert await engine.model_info() == ModelInfo("small", 512, 0)
        await engine.close()
