"""A retry costs no second generation: it follows the one in the air, or gets the one just delivered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from polar.config.settings import GatewaySettings
from polar.dialects import base as dialects
from polar.gateway.call import ModelCall, Send
from polar.gateway.flights import Flights
from polar.gateway.session import Session, SessionGrant, new_key
from polar.models.chat import ChatRequest, FinishReason, Message, Role, Usage
from polar.models.task import Budgets, SamplingPin
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene


async def ask(scene: Scene, *, retry: str | None, **fields: Any) -> str:
    """The answer's text; `retry` is what an SDK says of how often it has sent this before."""
    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    if retry is not None:
        headers["x-stainless-retry-count"] = retry
    async with scene.http.post(scene.url, json=scene.body(**fields), headers=headers) as response:
        assert response.status == 200, await response.text()
        if not fields.get("stream"):
            text: str = (await response.json())["choices"][0]["message"]["content"]
            return text
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
        return "".join(orjson.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


async def test_the_same_body_in_flight_is_generated_once(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene([Answer("One answer.", gate=gate, gate_at=2)])
    first = asyncio.create_task(ask(scene, retry=None, stream=True))
    await scene.engine.waiting.wait()
    second = asyncio.create_task(ask(scene, retry=None, stream=True))
    third = asyncio.create_task(ask(scene, retry="1", stream=True))
    gate.set()
    assert list(await asyncio.gather(first, second, third)) == ["One answer."] * 3
    assert len(scene.engine.requests) == len(await scene.captured()) == 1


async def test_a_retry_after_the_answer_was_delivered_gets_it_again(set_scene: SetScene) -> None:
    scene = await set_scene(["One answer."])
    assert await ask(scene, retry="0") == "One answer."
    assert await ask(scene, retry="1") == "One answer."
    assert len(await scene.captured()) == 1


async def test_a_request_that_says_it_is_new_is_generated_anew(set_scene: SetScene) -> None:
    scene = await set_scene(["First.", "Second."])
    assert [await ask(scene, retry="0"), await ask(scene, retry="0")] == ["First.", "Second."]
    assert len(await scene.captured()) == 2


async def test_after_the_window_the_same_body_is_a_new_request(set_scene: SetScene) -> None:
    scene = await set_scene(["First.", "Second."], settings=GatewaySettings(replay_seconds=0))
    assert [await ask(scene, retry=None), await ask(scene, retry=None)] == ["First.", "Second."]


async def test_a_failed_generation_is_not_replayed(set_scene: SetScene) -> None:
    scene = await set_scene([Answer("Broken.", failure=RuntimeError("no"), fail_at=1), "Whole."])
    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    async with scene.http.post(scene.url, json=scene.body(), headers=headers) as response:
        assert response.status >= 500
    assert await ask(scene, retry="1") == "Whole."


async def test_one_client_that_leaves_does_not_end_what_another_follows(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene([Answer("Still here.", gate=gate, gate_at=1)])
    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    leaving = await scene.http.post(scene.url, json=scene.body(stream=True), headers=headers)
    await scene.engine.waiting.wait()
    async with aiohttp.ClientSession() as http:
        staying = await http.post(scene.url, json=scene.body(stream=True), headers=headers)
        await staying.content.readline()
        leaving.close()
        gate.set()
        assert b"[DONE]" in await staying.read()
    assert not scene.engine.aborted


async def test_a_retry_right_after_the_client_left_is_generated_anew(tmp_path: Path) -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def work(call: ModelCall, accept: Callable[[], None], send: Send) -> dialects.Answer:
        accept()
        begun.set()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as a call that still has to write its record
            raise
        return dialects.Answer(Message(Role.ASSISTANT, "never"), FinishReason.STOP, Usage(1, 1))

    grant = SessionGrant("s", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
    session = Session(grant)
    flights = Flights(session, replay_seconds=60)
    call = ModelCall(session, ChatRequest("m", ()), "openai_chat")
    flight = flights.launch(call, work, b"same")
    with flight.followed():
        await begun.wait()
        assert flights.join(b"same", {}) is flight
    assert flights.join(b"same", {}) is None
    await asyncio.wait({flight.task})
    assert flights.join(b"same", {}) is None
