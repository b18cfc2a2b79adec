"""A chunk of many tokens is read as so many chunks of one would be."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from uuid import uuid4

import pytest

from polar.engines.base import GenerateRequest, TokenChunk
from polar.engines.embedded.scheduler import Generation, Sampled
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling

PROMPT = list(range(20, 60))


async def sampled(server: EmbeddedServer) -> tuple[list[int], list[float], TokenChunk]:
    engine = VllmEngine(server.url)
    await engine.model_info()
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=30)
    try:
        chunks = [chunk async for chunk in engine.generate(GenerateRequest(uuid4().hex, PROMPT, sampling))]
    finally:
        await engine.close()
    ids = [id for chunk in chunks for id in chunk.ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    return ids, logprobs, chunks[-1]


async def test_an_answer_in_one_chunk_has_all_its_tokens(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_by_one = await sampled(server)
    generate = server.worker.generate

    async def at_once(asked: Generation) -> AsyncGenerator[list[Sampled]]:
        async with aclosing(generate(asked)) as batches:
            yield [token async for batch in batches for token in batch]

    monkeypatch.setattr(server.worker, "generate", at_once)
    together = await sampled(server)
    assert len(together[0]) == 30
    assert together[0] == one_by_one[0]
    assert together[1] == pytest.approx(one_by_one[1], abs=1e-4)
    assert together[2].finish_reason == one_by_one[2].finish_reason
