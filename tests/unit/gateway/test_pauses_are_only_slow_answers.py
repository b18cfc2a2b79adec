"""While the policy is paused a harness waits, with keep-alives where it streams, and pays nothing for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polar.config.settings import GatewaySettings
from polar.engines.base import EngineError, WeightUpdate
from polar.gateway.server import SessionGrant, new_key
from polar.gateway.session import WallClock
from polar.models.chat import FinishReason
from polar.models.policy import PauseMode
from polar.models.task import Budgets, SamplingPin
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene
from tests.waiting import still_waits

QUICK = GatewaySettings(keepalive_seconds=0.02)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
    "/v1/responses": {"input": "Hi"},
}


async def test_a_call_waits_for_the_end_of_the_pause(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."])
    await scene.gateway.pause(PauseMode.KEEP)

    async def ask() -> int:
        async with scene.post(scene.body()) as response:
            await response.read()
            return response.status

    waiting = asyncio.create_task(ask())
    assert await still_waits(waiting)
    assert scene.engine.requests == []
    await scene.gateway.update_weights(WeightUpdate(3))
    await scene.gateway.resume()
    assert await asyncio.wait_for(waiting, 30) == 200
    (completion,) = await scene.captured()
    assert set(completion.policy_versions.tolist()) == {3}


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_is_kept_alive_in_its_own_dialect(set_scene: SetScene, path: str) -> None:
    scene = await set_scene(["Hello."], settings=QUICK)
    await scene.gateway.pause(PauseMode.KEEP)
    url = f"http://{scene.gateway.host}:{scene.gateway.port}{path}"
    body = BODIES[path] | {"model": "scripted", "stream": True}
    headers = {"Authorization": f"Bearer {scene.grant.key}", "x-api-key": scene.grant.key}
    if path == "/v1/messages":
        headers["anthropic-version"] = "2023-06-01"
    async with scene.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        early = b""
        async with asyncio.timeout(30):
            while early.count(b"\n\n") < 4:
                early += await response.content.readany()
        assert b"Hello" not in early
        await scene.gateway.resume()
        rest = await response.read()
    assert b"Hello" in rest
    assert b'"error":{' not in early + rest


async def test_a_completion_that_spans_an_update_carries_both_versions(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene([Answer("one two three four five", gate=gate, gate_at=3)])
    asking = asyncio.create_task(scene.post(scene.body()).__aenter__())
    await asyncio.wait_for(scene.engine.waiting.wait(), 30)
    await scene.gateway.pause(PauseMode.KEEP)
    gate.set()
    await scene.gateway.update_weights(WeightUpdate(1))
    await scene.gateway.resume()
    response = await asyncio.wait_for(asking, 30)
    assert (await response.json())["choices"][0]["message"]["content"] == "one two three four five"
    (completion,) = await scene.captured()
    versions = completion.policy_versions.tolist()
    assert versions == [0] * 3 + [1] * (len(versions) - 3)


async def test_a_broken_off_completion_is_continued_from_its_exact_tokens(set_scene: SetScene) -> None:
    first = Answer("one two three four five", gate=asyncio.Event(), gate_at=3)
    scene = await set_scene([first, " and so on"], sampling=SamplingPin(seed=9, max_tokens=40))
    asking = asyncio.create_task(scene.post(scene.body()).__aenter__())
    await asyncio.wait_for(scene.engine.waiting.wait(), 30)
    await scene.gateway.pause(PauseMode.ABORT)
    assert len(scene.engine.aborted) == 1
    await scene.gateway.update_weights(WeightUpdate(1))
    await scene.gateway.resume()
    response = await asyncio.wait_for(asking, 30)
    assert (await response.json())["choices"][0]["message"]["content"] == "one two three and so on"
    begun, went_on = scene.engine.requests
    (completion,) = await scene.captured()
    kept = completion.sampled_ids.tolist()[:3]
    assert went_on.prompt_ids == [*begun.prompt_ids, *kept]
    assert went_on.sampling.max_tokens == (begun.sampling.max_tokens or 0) - 3
    assert went_on.sampling.seed != begun.sampling.seed
    assert completion.prompt_ids.tolist() == begun.prompt_ids
    assert completion.policy_versions.tolist() == [0] * 3 + [1] * (len(completion.sampled_ids) - 3)
    assert completion.finish_reason is FinishReason.STOP


async def test_an_answer_with_penalties_is_never_broken_off(set_scene: SetScene) -> None:
    """Penalties count from an answer's first token: what is continued would be sampled otherwise."""
    gate = asyncio.Event()
    scene = await set_scene([Answer("one two three", gate=gate, gate_at=1)])
    asking = asyncio.create_task(scene.post(scene.body(presence_penalty=1)).__aenter__())
    await asyncio.wait_for(scene.engine.waiting.wait(), 30)
    await scene.gateway.pause(PauseMode.ABORT)
    assert (scene.engine.aborted, scene.engine.pauses) == ([], [PauseMode.DRAIN])
    await scene.gateway.resume()
    gate.set()
    response = await asyncio.wait_for(asking, 30)
    assert (await response.json())["choices"][0]["message"]["content"] == "one two three"
    assert len(scene.engine.requests) == 1


async def test_a_client_that_leaves_during_a_pause_is_let_go(set_scene: SetScene) -> None:
    scene = await set_scene(["never asked for"])
    await scene.gateway.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(scene.post(scene.body()).__aenter__())
    assert await still_waits(waiting)
    waiting.cancel()
    await asyncio.wait({waiting})
    await scene.gateway.close_session("s1")
    await scene.gateway.resume()
    assert scene.engine.requests == []


async def timed(scene: Scene, seconds: float) -> None:
    capture = scene.grant.capture.with_name("timed")
    scene.grant = SessionGrant("s2", new_key(), capture, SamplingPin(), Budgets(), deadline_seconds=seconds)
    scene.gateway.open_session(scene.grant)


@pytest.mark.parametrize("opens_paused", [False, True])
async def test_paused_time_costs_no_wall_time(set_scene: SetScene, opens_paused: bool) -> None:
    scene = await set_scene(["Hello."])
    if opens_paused:
        await scene.gateway.pause(PauseMode.KEEP)
    await timed(scene, 1.0)
    await scene.gateway.pause(PauseMode.KEEP)
    spent = asyncio.create_task(scene.gateway.budget_spent("s2"))
    done, _ = await asyncio.wait({spent}, timeout=1.5)
    assert not done
    await scene.gateway.resume()
    assert await asyncio.wait_for(spent, 30)


async def test_a_clock_goes_on_with_what_is_left() -> None:
    spent = asyncio.Event()
    clock = WallClock(30.0, spent.set, is_paused=False)
    clock.pause()
    clock.pause()
    clock.resume()
    clock.stop()
    clock.resume()
    assert (clock.is_spent, spent.is_set()) == (False, False)


async def test_an_engine_that_cannot_pause_leaves_everything_running(
    set_scene: SetScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await set_scene(["Hello."])

    async def fail(_mode: PauseMode) -> None:
        raise EngineError("no such route")

    monkeypatch.setattr(scene.engine, "pause", fail)
    await timed(scene, 0.1)
    with pytest.raises(EngineError):
        await scene.gateway.pause(PauseMode.KEEP)
    assert not scene.gateway.is_paused
    await asyncio.wait_for(scene.gateway.budget_spent("s2"), 30)
