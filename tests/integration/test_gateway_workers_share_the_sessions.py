"""Several gateway processes: sessions are spread, traces stay the same, one that dies takes only its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from polar.app.stack import data_plane, running
from polar.client import AsyncClient
from polar.config.settings import EngineSettings, GatewaySettings, NodeSettings, ServerSettings, Settings
from polar.engines.base import WeightUpdate
from polar.errors import Conflict
from polar.gateway import pool
from polar.gateway.capture import read_capture
from polar.gateway.gateways import Address, Gateways
from polar.gateway.line import GatewayEnded
from polar.gateway.session import SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.policy import PauseMode
from polar.models.session import Progress, SessionStatus
from polar.models.task import Budgets, SamplingPin
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import VllmWire, vllm_wire
from tests.systems import ASK, RUNTIMES, shell_task

pytestmark = pytest.mark.timeout(120)


@dataclass
class Scene:
    """Two sessions, a and b, on a gateway of so many processes."""

    gateway: Gateways
    wire: VllmWire
    http: aiohttp.ClientSession
    directory: Path
    addresses: dict[str, Address]
    keys: dict[str, str]

    def grant(self, session: str, **budgets: Any) -> SessionGrant:
        key = self.keys.setdefault(session, new_key())
        pin, budget = SamplingPin(seed=3), Budgets(**budgets)
        return SessionGrant(session, key, self.directory / f"{session}.log", pin, budget)

    async def ask(self, session: str, *turns: str, at: str | None = None) -> tuple[int, dict[str, Any]]:
        """Turns of user and assistant, in turn; sent to the session's gateway, or to another session's."""
        address = self.addresses[at or session]
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
        async with self.http.post(
            f"http://{address.host}:{address.port}/v1/chat/completions",
            json={"model": "small", "messages": messages},
            headers={"Authorization": f"Bearer {self.keys[session]}", "x-stainless-retry-count": "0"},
        ) as response:
            return response.status, await response.json()

    def captured(self, session: str) -> list[Completion]:
        return read_capture(self.directory / f"{session}.log")

    def worker(self, session: str) -> psutil.Process:
        """The process that serves a session."""
        port = self.addresses[session].port
        (worker,) = [
            worker
            for worker in workers()
            if any(at.status == "LISTEN" and at.laddr.port == port for at in worker.net_connections("tcp"))
        ]
        return worker


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "polar.gateway.worker" in child.cmdline()]


SetScene = Callable[[int], Awaitable[Scene]]


@pytest.fixture
async def set_scene(tmp_path: Path) -> AsyncIterator[SetScene]:
    async with AsyncExitStack() as parts:

        async def scene(workers: int) -> Scene:
            wire = await parts.enter_async_context(vllm_wire(Said("Hello."), takes_orders=True))
            settings = Settings(
                data_dir=tmp_path,
                engine=EngineSettings(url=wire.url, mode="chat"),
                gateway=GatewaySettings(workers=workers),
            )
            plane = await parts.enter_async_context(data_plane(settings, lambda _step: None))
            http = await parts.enter_async_context(aiohttp.ClientSession())
            directory = tmp_path / str(workers)
            made = Scene(plane.gateway, wire, http, directory, {}, {})
            for session in "ab":
                made.addresses[session] = parts.enter_context(plane.gateway.placed(session))
                await plane.gateway.open_session(made.grant(session))
            return made

        yield scene


async def test_sessions_are_spread_and_a_key_opens_only_its_own_gateway(set_scene: SetScene) -> None:
    scene = await set_scene(2)
    assert scene.addresses["a"].port != scene.addresses["b"].port
    assert [(await scene.ask(session, "Hi"))[0] for session in "ab"] == [200, 200]
    assert (await scene.ask("a", "Hi", at="b"))[0] == 401
    with scene.gateway.placed("c") as c, scene.gateway.placed("d") as d:
        assert {c, d} == set(scene.addresses.values())
        with pytest.raises(Conflict), scene.gateway.placed("c"):
            pass
        (load,) = [
            family
            for family in await scene.gateway.metric_families()
            if family.name == "polar_gateway_open_sessions"
        ]
        assert [(sample.labels, sample.value) for sample in load.samples] == [
            ({"worker": "0"}, 1),
            ({"worker": "1"}, 1),
        ]
    await scene.gateway.close_session("a")
    assert scene.gateway.progress("a") == Progress(completions=1, sampled_tokens=7)
    assert (await scene.ask("a", "Hi"))[0] == 410


async def test_budgets_are_told_over_the_line(set_scene: SetScene) -> None:
    scene = await set_scene(2)
    await scene.gateway.close_session("a")
    await scene.gateway.open_session(scene.grant("a", max_completions=1))
    spent = asyncio.create_task(scene.gateway.budget_spent("a"))
    abandoned = asyncio.create_task(scene.gateway.budget_spent("b"))
    assert (await scene.ask("a", "Hi"))[0] == 200
    assert not spent.done()
    assert (await scene.ask("a", "Hi again"))[1]["error"]["code"] == "insufficient_quota"
    assert await asyncio.wait_for(spent, 10) is False
    abandoned.cancel()
    await asyncio.wait({abandoned})
    with pytest.raises(Conflict, match="open already"):
        await scene.gateway.open_session(scene.grant("b"))


async def test_traces_are_the_same_with_one_process_and_with_two(set_scene: SetScene) -> None:
    recorded = []
    for workers in (1, 2):
        scene = await set_scene(workers)
        for session in "ab":
            await scene.ask(session, "Hi")
            await scene.ask(session, "Hi", "Hello.", f"And {session}?")
            await scene.gateway.close_session(session)
        recorded.append([scene.captured(session) for session in "ab"])
    for one, two in zip(*recorded, strict=True):
        assert [_content(one, place) for place in range(2)] == [_content(two, place) for place in range(2)]
        assert one[1].parent == one[0].id
        assert two[1].parent == two[0].id


def _content(completions: list[Completion], place: int) -> Any:
    """All that a trace is made from, and neither ids of completions nor times."""
    completion = completions[place]
    arrays = (completion.prompt_ids, completion.sampled_ids, completion.logprobs, completion.policy_versions)
    rest = (completion.messages, completion.response, completion.used, completion.untrainable)
    return [array.tolist() for array in arrays], rest


async def test_a_process_that_dies_ends_its_own_sessions_and_comes_back(set_scene: SetScene) -> None:
    scene = await set_scene(2)
    await scene.ask("a", "Hi")
    waiting = asyncio.create_task(scene.gateway.budget_spent("a"))
    await scene.ask("b", "Hi")
    scene.worker("a").kill()
    with pytest.raises(GatewayEnded, match="has ended"):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(GatewayEnded, match="has ended"):
        await scene.gateway.close_session("a")
    assert (await scene.ask("b", "Still here?"))[0] == 200
    assert [completion.response.content for completion in scene.captured("a")] == ["Hello."]
    with scene.gateway.placed("c") as first, scene.gateway.placed("d") as second:
        scene.addresses |= {"c": first, "d": second}
        for session in "cd":
            await scene.gateway.open_session(scene.grant(session))
            assert (await scene.ask(session, "Hi"))[0] == 200


async def test_a_process_that_hangs_is_taken_for_dead(
    set_scene: SetScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SILENCE_SECONDS", 5.0)
    scene = await set_scene(2)
    waiting = asyncio.create_task(scene.gateway.budget_spent("a"))
    with scene.gateway.placed("c") as scene.addresses["c"]:
        assert scene.addresses["c"] == scene.addresses["a"]
        scene.worker("a").suspend()
        with pytest.raises(GatewayEnded, match="has ended"):
            await asyncio.wait_for(waiting, 60)
        await scene.gateway.open_session(scene.grant("c"))
        assert (await scene.ask("c", "Hi"))[0] == 200
    assert (await scene.ask("b", "Hi"))[0] == 200
    await scene.gateway.close_session("b")


async def test_a_pause_reaches_every_process_and_one_that_comes_back_in_it(set_scene: SetScene) -> None:
    scene = await set_scene(2)
    await scene.gateway.pause(PauseMode.KEEP)
    assert scene.gateway.is_paused
    await scene.gateway.update_weights(WeightUpdate(4))
    asked = [asyncio.create_task(scene.ask(session, "Hi")) for session in "ab"]
    scene.worker("a").kill()
    with pytest.raises(aiohttp.ClientError):
        await asked[0]
    with pytest.raises(GatewayEnded):
        await scene.gateway.close_session("a")
    with scene.gateway.placed("c") as c, scene.gateway.placed("d") as d:
        scene.addresses |= {"c": c, "d": d}
        for session in "cd":
            await scene.gateway.open_session(scene.grant(session))
            asked.append(asyncio.create_task(scene.ask(session, "Hi")))
        assert await scene.gateway.policy_version() == 4
        assert scene.wire.orders.count("/collective_rpc") == 1, "the weights were loaded again"
        # All is quiet by now, the start-up checks of chat mode aside.
        assert [body["messages"][0]["content"] for body in scene.wire.bodies if body["max_tokens"] != 1] == []
        await scene.gateway.resume()
        assert [status for status, _ in await asyncio.gather(*asked[1:])] == [200, 200, 200]
        for session in "bcd":
            (completion,) = scene.captured(session)
            assert set(completion.policy_versions.tolist()) == {4}


async def test_a_process_that_hangs_as_it_comes_back_keeps_no_order_waiting(
    set_scene: SetScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "SILENCE_SECONDS", 3.0)
    scene = await set_scene(2)
    await scene.gateway.pause(PauseMode.KEEP)
    start, hangs = pool._Worker.start, asyncio.Event()

    async def start_and_hang_once(worker: pool._Worker, assignment: pool.Assignment) -> None:
        await start(worker, assignment)
        if not hangs.is_set():
            assert worker._process is not None
            psutil.Process(worker._process.pid).suspend()
            hangs.set()

    monkeypatch.setattr(pool._Worker, "start", start_and_hang_once)
    scene.worker("a").kill()
    await hangs.wait()
    await asyncio.wait_for(scene.gateway.resume(), 60)
    assert (await scene.ask("b", "Hi"))[0] == 200
    with scene.gateway.placed("c") as c, scene.gateway.placed("d") as d:
        scene.addresses |= {"c": c, "d": d}
        for session in "cd":
            await scene.gateway.open_session(scene.grant(session))
            assert (await scene.ask(session, "Hi"))[0] == 200


async def test_a_session_says_that_its_gateway_died(tmp_path: Path) -> None:
    async with vllm_wire(Said("Hello.")) as wire:
        settings = Settings(
            data_dir=tmp_path / "data",
            server=ServerSettings(port=0, max_attempts=1),
            engine=EngineSettings(url=wire.url, mode="chat"),
            gateway=GatewaySettings(workers=2),
            node=NodeSettings(runtimes=RUNTIMES),
        )
        async with (
            running(settings, lambda _step: None) as stack,
            AsyncClient(stack.url, stack.token) as client,
        ):
            wire.arrived.clear()
            await client.submit(shell_task("t", f"{ASK}; sleep 60"))
            await wire.arrived.wait()
            for worker in workers():
                worker.kill()
            (result,) = await client.wait(["t"], timeout=60)
    assert result.status is SessionStatus.FAILED
    assert "the gateway process that served this session has ended" in (result.error or "")
