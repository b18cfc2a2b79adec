"""A session samples as its task pins it and stops where its budgets say."""

from __future__ import annotations

import asyncio

from polar.models.session import Progress
from polar.models.task import Budgets, SamplingPin
from tests.unit.gateway.conftest import Scene, SetScene


async def refused(scene: Scene, status: int, code: str) -> None:
    async with scene.post(scene.body()) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] == code


async def test_completions_over_the_budget_are_refused_and_reported(set_scene: SetScene) -> None:
    scene = await set_scene(["a", "b"], budgets=Budgets(max_completions=2))
    spent = asyncio.create_task(scene.gateway.budget_spent("s1"))
    for _ in range(2):
        async with scene.post(scene.body()) as response:
            assert response.status == 200
    assert not spent.done()
    await refused(scene, 400, "insufficient_quota")
    await spent
    assert scene.gateway.progress("s1").completions == 2


async def test_sampled_tokens_are_clamped_to_the_budget_and_then_refused(set_scene: SetScene) -> None:
    scene = await set_scene(["one two three four five six"] * 2, budgets=Budgets(max_sampled_tokens=4))
    async with scene.post(scene.body()) as response:
        assert (await response.json())["choices"][0]["finish_reason"] == "length"
    assert scene.engine.requests[0].sampling.max_tokens == 4
    await refused(scene, 400, "insufficient_quota")
    await scene.gateway.budget_spent("s1")
    assert scene.gateway.progress("s1") == Progress(completions=1, sampled_tokens=4)


async def test_a_context_over_the_budget_is_refused_and_reported(set_scene: SetScene) -> None:
    scene = await set_scene([], budgets=Budgets(max_context_tokens=10))
    await refused(scene, 400, "insufficient_quota")
    await scene.gateway.budget_spent("s1")


async def test_a_context_over_the_models_is_refused_in_openais_words(set_scene: SetScene) -> None:
    scene = await set_scene([], max_context=16)
    async with scene.post(scene.body()) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 16 tokens" in error["message"]


async def test_max_tokens_fits_the_context_the_pin_and_the_wish(set_scene: SetScene) -> None:
    scene = await set_scene(["a"] * 3, max_context=100, sampling=SamplingPin(max_tokens=50))
    for wish in (None, 20, 70):
        body = scene.body() if wish is None else scene.body(max_tokens=wish)
        async with scene.post(body) as response:
            assert response.status == 200
    prompt = len(scene.engine.requests[0].prompt_ids)
    assert [request.sampling.max_tokens for request in scene.engine.requests] == [50, 20, 50]
    crowded = await set_scene(["a"], max_context=prompt + 5)
    async with crowded.post(crowded.body(max_tokens=50)) as response:
        assert response.status == 200
    assert crowded.engine.requests[0].sampling.max_tokens == 5


async def test_pins_overrule_the_harness_and_both_are_recorded(set_scene: SetScene) -> None:
    pin = SamplingPin(temperature=1.0, top_p=0.9, top_k=5, seed=7)
    scene = await set_scene(["a", "b"], sampling=pin)
    for _ in range(2):
        async with scene.post(scene.body(temperature=0, top_p=0.5, seed=1)) as response:
            assert response.status == 200
    first, second = await scene.captured()
    assert (first.asked.temperature, first.asked.top_p, first.asked.seed) == (0, 0.5, 1)
    assert (first.used.temperature, first.used.top_p, first.used.top_k) == (1.0, 0.9, 5)
    assert first.used.seed != second.used.seed


async def test_pinned_seeds_repeat_in_another_session_and_differ_between_samples(set_scene: SetScene) -> None:
    async def seeds(sample: int) -> list[int | None]:
        scene = await set_scene(["a", "b"], sampling=SamplingPin(seed=7), sample=sample)
        for _ in range(2):
            async with scene.post(scene.body()) as response:
                assert response.status == 200
        return [request.sampling.seed for request in scene.engine.requests]

    first, again, other = await seeds(0), await seeds(0), await seeds(1)
    assert first == again
    assert not set(first) & set(other)


async def test_parallel_calls_cannot_exceed_the_completions(set_scene: SetScene) -> None:
    from tests.fakes.scripted_engine import Answer

    gate = asyncio.Event()
    scene = await set_scene([Answer("a", gate=gate)], budgets=Budgets(max_completions=1))
    call = asyncio.create_task(scene.post(scene.body()).__aenter__())
    await scene.engine.waiting.wait()
    await refused(scene, 400, "insufficient_quota")
    gate.set()
    assert (await call).status == 200
