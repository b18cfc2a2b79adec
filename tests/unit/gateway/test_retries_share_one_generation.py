"""A retry costs no second generation, and a request that is not known to be a retry is always sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from polar.config.settings import GatewaySettings
from polar.dialects import base as dialects
from polar.engines.base import EngineError
from polar.gateway.call import ModelCall, Send
from polar.gateway.quota import GatewayMemory
from polar.gateway.request_coalescer import InFlight, RequestCoalescer
from polar.gateway.session import Session, SessionGrant, new_key
from polar.models.chat import FinishReason, Message, Role, Usage
from polar.models.task import Budgets, SamplingPin
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import Scene, SetScene

Work = Callable[[ModelCall], Awaitable[dialects.Answer]]
FIRST, RETRY = {"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "1"}


async def ask(scene: Scene, *, retry: str | None, key: str | None = None, **fields: Any) -> str:
    """The answer's text; `retry` is what an SDK says of how often it has sent this before."""
    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    if retry is not None:
        headers["x-stainless-retry-count"] = retry
    if key is not None:
        headers["Idempotency-Key"] = key
    async with scene.http.post(scene.url, json=scene.body(**fields), headers=headers) as response:
        assert response.status == 200, await response.text()
        if not fields.get("stream"):
            text: str = (await response.json())["choices"][0]["message"]["content"]
            return text
        events = [line[6:] for line in (await response.text()).splitlines() if line.startswith("data: {")]
        return "".join(orjson.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


@pytest.mark.parametrize("retry", [None, "0"])
async def test_equal_requests_at_once_are_one_sample_each(set_scene: SetScene, retry: str | None) -> None:
    answers = [f"Sample {number}." for number in range(4)]
    scene = await set_scene(answers)
    asked = [ask(scene, retry=retry, stream=stream) for stream in (False, False, True, True)]
    assert sorted(await asyncio.gather(*asked)) == answers
    assert len(await scene.captured()) == 4


@pytest.mark.parametrize("retry", [None, "0"])
async def test_an_equal_request_after_a_delivered_answer_is_sampled_anew(
    set_scene: SetScene, retry: str | None
) -> None:
    scene = await set_scene(["First.", "Second.", "Third."])
    said = [await ask(scene, retry=retry, stream=stream) for stream in (False, True, False)]
    assert said == ["First.", "Second.", "Third."]
    assert len(await scene.captured()) == 3


async def test_a_marked_retry_follows_the_generation_in_flight(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene([Answer("One answer.", gate=gate, gate_at=2)])
    first = asyncio.create_task(ask(scene, retry=None, stream=True))
    await scene.engine.waiting.wait()
    second = asyncio.create_task(ask(scene, retry="1", stream=True))
    third = asyncio.create_task(ask(scene, retry="2", stream=True))
    gate.set()
    assert list(await asyncio.gather(first, second, third)) == ["One answer."] * 3
    assert len(scene.engine.requests) == len(await scene.captured()) == 1


async def test_a_marked_retry_of_one_of_several_equal_requests_is_sampled(set_scene: SetScene) -> None:
    scene = await set_scene(["First.", "Second.", "Third."])
    await asyncio.gather(ask(scene, retry="0"), ask(scene, retry="0"))
    assert await ask(scene, retry="1") == "Third."


async def test_a_retry_after_the_answer_was_delivered_gets_it_again(set_scene: SetScene) -> None:
    scene = await set_scene(["One answer."])
    assert await ask(scene, retry="0") == "One answer."
    assert await ask(scene, retry="1") == "One answer."
    assert len(await scene.captured()) == 1


async def test_a_repeated_idempotency_key_is_a_retry_and_another_key_is_not(set_scene: SetScene) -> None:
    scene = await set_scene(["First.", "Second."])
    keys = ("one", "one", "other")
    said = [await ask(scene, retry=None, key=key) for key in keys]
    assert said == ["First.", "First.", "Second."]


async def test_after_the_window_a_retry_is_sampled(set_scene: SetScene) -> None:
    scene = await set_scene(["First.", "Second."], settings=GatewaySettings(retry_seconds=0))
    assert [await ask(scene, retry="0"), await ask(scene, retry="1")] == ["First.", "Second."]


@pytest.mark.parametrize("count", ["", "-1", "00", "one", "\u0661", "9" * 5000])
def test_a_strange_retry_count_breaks_nothing(tmp_path: Path, count: str) -> None:
    coalescer = RequestCoalescer(60)
    assert coalescer.join(b"asked", {"x-stainless-retry-count": count}) is None


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
        retry = headers | {"x-stainless-retry-count": "1"}
        staying = await http.post(scene.url, json=scene.body(stream=True), headers=retry)
        await staying.content.readline()
        leaving.close()
        gate.set()
        assert b"[DONE]" in await staying.read()
    assert not scene.engine.aborted


async def test_a_retry_after_the_client_left_in_the_middle_is_sampled_anew(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def work(call: ModelCall) -> dialects.Answer:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # as a call that still has to write its record
            raise
        return _answer()

    coalescer, in_flight = _launched(tmp_path, work)
    with in_flight.followed():
        await begun.wait()
        assert coalescer.join(b"same", RETRY) is in_flight
    assert coalescer.join(b"same", RETRY) is None
    await asyncio.wait(in_flight.tasks)
    assert coalescer.join(b"same", {}) is None


async def test_an_answer_whose_client_was_gone_goes_to_the_next_equal_request_once(tmp_path: Path) -> None:
    async def work(call: ModelCall) -> dialects.Answer:
        return _answer()

    coalescer, in_flight = _launched(tmp_path, work)
    with in_flight.followed():
        await in_flight.answers()  # and then its connection is gone
    assert coalescer.join(b"same", FIRST) is None
    assert coalescer.join(b"same", {}) is in_flight
    with in_flight.followed():
        assert coalescer.join(b"same", {}) is None
        assert await in_flight.answers() == [_answer()]
        in_flight.is_delivered = True
    assert coalescer.join(b"same", {}) is None


async def test_choices_of_which_one_failed_are_not_kept_for_a_retry(tmp_path: Path) -> None:
    async def work(call: ModelCall) -> dialects.Answer:
        if call is calls[1]:
            raise EngineError("no")
        return _answer()

    session = _session(tmp_path)
    coalescer = RequestCoalescer(retry_seconds=60)
    calls = [WorkingCall(session, work) for _ in range(2)]
    in_flight = coalescer.launch(calls, b"same")
    with in_flight.followed(), pytest.raises(EngineError):
        await in_flight.answers()
    await asyncio.wait(in_flight.tasks)
    await asyncio.sleep(0)
    assert in_flight.finished_at is None
    assert coalescer.join(b"same", RETRY) is None


class WorkingCall(ModelCall):
    """A call whose answer comes from a function."""

    def __init__(self, session: Session, work: Work) -> None:
        self.session = session
        self._work = work

    async def prepare(self) -> None:
        return

    async def run(self, send: Send) -> dialects.Answer:
        return await self._work(self)


def _launched(tmp_path: Path, work: Work) -> tuple[RequestCoalescer, InFlight]:
    coalescer = RequestCoalescer(retry_seconds=60)
    return coalescer, coalescer.launch([WorkingCall(_session(tmp_path), work)], b"same")


def _session(tmp_path: Path) -> Session:
    grant = SessionGrant("s", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
    settings = GatewaySettings()
    return Session(grant, settings, GatewayMemory(settings), lambda *_: None, is_paused=False)


def _answer() -> dialects.Answer:
    return dialects.Answer(Message(Role.ASSISTANT, "whole"), FinishReason.STOP, Usage(1, 1))
