"""Every call ends up in the gateway's metrics: its time, its tokens, or why it was refused."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from polar.dialects.base import Refusal
from polar.gateway.metrics import GatewayMetrics
from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import CACHED, Completion
from polar.models.task import Budgets
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene


def value(scene: Scene, name: str, **labels: str) -> float:
    return scene.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


async def test_times_and_tokens_are_counted_by_dialect(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello.", "Bye."])
    for _ in range(2):
        async with scene.post(scene.body()) as response:
            assert response.status == 200
    sampled = sum(completion.sampled_tokens for completion in await scene.captured())
    assert value(scene, "polar_gateway_call_seconds_count", dialect="openai_chat") == 2
    assert value(scene, "polar_gateway_first_token_seconds_sum", dialect="openai_chat") > 0
    assert value(scene, "polar_gateway_sampled_tokens_total", dialect="openai_chat") == sampled
    assert value(scene, "polar_gateway_prompt_tokens_total", dialect="openai_chat") > 0
    ended = {"dialect": "openai_chat", "finish_reason": "stop"}
    assert value(scene, "polar_gateway_completions_total", **ended) == 2


async def test_a_retry_that_follows_another_is_counted_apart(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene([Answer("One answer.", gate=gate, gate_at=1)])
    headers = {"Authorization": f"Bearer {scene.grant.key}"}

    async def ask(**more: str) -> None:
        async with scene.http.post(scene.url, json=scene.body(), headers=headers | more) as response:
            assert response.status == 200

    first = asyncio.create_task(ask())
    await scene.engine.waiting.wait()
    assert value(scene, "polar_gateway_open_calls") == value(scene, "polar_gateway_open_sessions") == 1
    gate.set()
    await first
    await ask(**{"x-stainless-retry-count": "1"})
    assert value(scene, "polar_gateway_coalesced_total", dialect="openai_chat") == 1
    assert value(scene, "polar_gateway_call_seconds_count", dialect="openai_chat") == 1
    assert value(scene, "polar_gateway_open_calls") == 0


async def test_refusals_are_counted_by_their_reason(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."], budgets=Budgets(max_completions=1))
    async with scene.post(scene.body(), key="no-such-key") as response:
        assert response.status == 401
    for status in (200, 429):
        async with scene.post(scene.body()) as response:
            assert (response.status == 200) == (status == 200)
    for reason in (Refusal.UNKNOWN_KEY, Refusal.BUDGET_SPENT):
        labels = {"dialect": "openai_chat", "reason": reason.value}
        assert value(scene, "polar_gateway_refused_total", **labels) == 1


async def test_an_agent_finds_no_metrics_at_the_gateway(set_scene: SetScene) -> None:
    scene = await set_scene([])
    root = scene.url.removesuffix("/v1/chat/completions")
    for path in ("/metrics", f"/k/{scene.grant.key}/metrics"):
        async with scene.http.get(f"{root}{path}") as response:
            assert response.status == 404
            assert "polar_gateway" not in await response.text()


def test_counting_costs_little() -> None:
    metrics = GatewayMetrics(int, int, bool)
    ids = np.arange(64, dtype=np.int32)
    now = time.time()
    done = Completion(
        "c",
        0,
        ids,
        ids,
        np.zeros(64, np.float32),
        np.zeros(64, np.int32),
        (),
        Message(Role.ASSISTANT, "x"),
        FinishReason.STOP,
        dialect="openai_chat",
        started_at=now - 1,
        first_token_at=now - 0.5,
        ended_at=now,
        extra={CACHED: "32"},
    )
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(200):
            metrics.recorded(done)
        best = min(best, (time.process_time() - start) / 200)
    # The gateway takes about a millisecond for a completion; this is a bound for slow machines.
    assert best < 100e-6
    count = metrics.registry.get_sample_value("polar_gateway_cached_tokens_total", {"dialect": "openai_chat"})
    assert count == 5 * 200 * 32
