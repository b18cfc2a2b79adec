"""The logprobs of given tokens are those of a teacher-forced forward, whatever else the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import aiohttp
import numpy as np
import pytest

from polar.config.settings import EngineSettings
from polar.engines.base import ContextOverflow, EngineError, GenerateRequest
from polar.engines.embedded import scheduler
from polar.engines.embedded.model import NewWeights, SlotModel, load
from polar.engines.embedded.sampler import Draw
from polar.engines.embedded.scheduler import Generation
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.embedded.worker import Worker
from polar.engines.replicas import Replicas
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from tests.fakes.tiny_llama import CONTEXT

Reference = Callable[[list[int], list[int]], list[float]]
TOLERANCE = 1e-4


def tokens(seed: int, length: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(0, 256, length)]


async def scored(worker: Worker, ids: list[int]) -> list[float] | None:
    batches = [batch async for batch in worker.generate(Generation(ids, 1, scores_prompt=True))]
    return batches[0][0].prompt_logprobs


@pytest.fixture
async def engine(server: EmbeddedServer) -> AsyncIterator[VllmEngine]:
    client = VllmEngine(server.url)
    yield client
    await client.close()


async def test_scores_are_those_of_a_teacher_forced_forward(
    tiny: SlotModel, reference_logprobs: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SCORED_BYTES", 0)
    ids = tokens(1, 150)
    async with EmbeddedServer(tiny) as server:
        scores = await scored(server.worker, ids)
        assert await scored(server.worker, ids[:1]) == []
    assert scores == pytest.approx(reference_logprobs(ids[:1], ids[1:]), abs=TOLERANCE)


async def test_what_was_sampled_is_scored_as_it_was_recorded(engine: VllmEngine) -> None:
    prompt = tokens(2, 40)
    asked = GenerateRequest("r", prompt, Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=50))
    chunks = [chunk async for chunk in engine.generate(asked)]
    sampled = [id for chunk in chunks for id in chunk.ids]
    recorded = [logprob for chunk in chunks for logprob in chunk.logprobs]
    scores = await engine.score([*prompt, *sampled])
    assert scores[len(prompt) :] == pytest.approx(recorded, abs=TOLERANCE)


async def test_scoring_and_sampling_share_one_slot_without_harm(
    tiny_directory: object, reference_logprobs: Reference
) -> None:
    model = load(EngineSettings(model=str(tiny_directory), device="cpu", slots=1))
    async with EmbeddedServer(model) as server:
        worker = server.worker
        ids = [tokens(seed, 120) for seed in range(3)]

        async def sampled(prompt: list[int]) -> list[int]:
            return [
                token.token_id
                async for batch in worker.generate(Generation(prompt, 12, Draw(seed=5)))
                for token in batch
            ]

        alone = [await sampled(one) for one in ids]
        score = partial(scored, worker)
        answers = await asyncio.gather(*map(score, ids), *map(sampled, ids), *map(score, ids))
    for one, scores in zip([*ids, *ids], [*answers[:3], *answers[6:]], strict=True):
        assert scores == pytest.approx(reference_logprobs(one[:1], one[1:]), abs=TOLERANCE)
    assert answers[3:6] == alone


async def test_a_scoring_that_is_given_up_frees_its_slot(server: EmbeddedServer) -> None:
    scorings = [asyncio.create_task(scored(server.worker, tokens(seed, 200))) for seed in range(6)]
    await asyncio.sleep(0)
    for scoring in scorings:
        scoring.cancel()
    await asyncio.wait(scorings)
    await server.worker.resume()
    assert server.scheduler.table.free == len(server.scheduler.table.slots)
    assert await scored(server.worker, tokens(0, 20)) is not None


async def test_a_prompt_that_meets_new_weights_in_part_is_scored_anew(
    tiny: SlotModel, reference_logprobs: Reference
) -> None:
    ids = tokens(4, 60)
    slow = scheduler.Scheduler(tiny, scheduler.Chunks(shared=16, alone=16))
    slow.submit(0, Generation(ids, 1, scores_prompt=True))
    slow.step()
    slow.use(NewWeights(1, {}))
    found: list[scheduler.Sampled] = []
    while not found:
        found = slow.step()
    assert found[0].policy_version == 1
    assert found[0].prompt_logprobs == pytest.approx(reference_logprobs(ids[:1], ids[1:]), abs=TOLERANCE)


async def test_a_failing_score_is_an_error_and_the_next_is_served(
    server: EmbeddedServer, engine: VllmEngine, tiny: SlotModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(_segments: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(tiny, "forward", out_of_memory)
        with pytest.raises(EngineError, match="failed while it computed"):
            await engine.score(tokens(0, 20))
    assert len(await engine.score(tokens(0, 20))) == 20


async def test_a_scored_prompt_must_fit(engine: VllmEngine) -> None:
    with pytest.raises(ContextOverflow):
        await engine.score(tokens(0, CONTEXT))
    assert len(await engine.score(tokens(0, CONTEXT - 1))) == CONTEXT - 1


async def test_the_answer_is_in_the_form_of_vllm(server: EmbeddedServer) -> None:
    body = {"prompt": [50, 60, 70], "max_tokens": 1, "prompt_logprobs": 0}
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/v1/completions", json=body) as response:
            (choice,) = (await response.json())["choices"]
        async with http.post("/v1/completions", json=body | {"stream": True}) as response:
            assert response.status == 400
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in others] == [["60"], ["70"]]
    assert others[0]["60"].keys() == {"logprob", "rank", "decoded_token"}


async def test_replicas_score_with_one_of_them(server: EmbeddedServer, engine: VllmEngine) -> None:
    replicas = Replicas({"a": VllmEngine(server.url), "b": VllmEngine(server.url)})
    try:
        ids = tokens(3, 30)
        assert await replicas.score(ids) == await engine.score(ids)
    finally:
        await replicas.close()
