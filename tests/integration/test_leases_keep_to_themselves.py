"""What a lease leaves on its node is mixed into no other, is there to look at, and goes in time."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from polar.models.session import SessionStatus
from polar.models.views import MOST_LEASES
from polar.store.store import Store
from tests.fakes.scripted_engine import Answer, Script
from tests.systems import ASK, shell_task, system
from tests.waiting import eventually


async def test_a_session_given_back_and_leased_again_records_each_answer_once(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script: list[Script] = ["Begun.", Answer("Never.", gate=gate), "Begun again.", "Done."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("moved", ASK + ASK))
        async with running.node():
            await running.engine.waiting.wait()
        (left,) = (tmp_path / "data/nodes/local/captures").iterdir()
        assert left.stat().st_size > 0
        gate.set()
        async with running.node():
            (result,) = await running.client.wait(["moved"], timeout=120)
    assert (result.status, result.stats.completions) == (SessionStatus.COMPLETED, 2)
    assert [left] == list((tmp_path / "data/nodes/local/captures").iterdir())


async def test_a_session_that_comes_back_to_its_node_ends_what_its_lost_lease_began(tmp_path: Path) -> None:
    script: list[Script] = [Answer("Never.", gate=asyncio.Event()), "Done."]
    async with system(tmp_path / "data", script) as running, running.node():
        await running.client.submit(shell_task("back", ASK))
        await running.engine.waiting.wait()
        # Another server of the store, an hour later, has not heard of the node for too long.
        async with Store.open(tmp_path / "data", lambda: time.time() + 3600) as later:
            assert (await later.leases.expire(max_attempts=2)).requeued == 1
        (result,) = await running.client.wait(["back"], timeout=120)
    assert (result.status, result.error, result.attempt) == (SessionStatus.COMPLETED, None, 2)
    assert result.stats.completions == 1


async def test_a_node_with_more_places_than_a_request_may_ask_for_works(tmp_path: Path) -> None:
    many = MOST_LEASES + 1
    async with (
        system(tmp_path / "data", ["A fine answer."]) as running,
        running.node(run_slots=many, init_workers=many, ready_buffer=many),
    ):
        await running.client.submit(shell_task("one", ASK))
        (result,) = await running.client.wait(["one"], timeout=120)
    assert result.status is SessionStatus.COMPLETED


async def test_a_node_that_starts_lets_go_of_what_was_left_long_ago(tmp_path: Path) -> None:
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        node_dir = tmp_path / "data/nodes/local"
        captures, logs = node_dir / "captures", node_dir / "logs/old.0@1"
        for directory in (captures, logs):
            directory.mkdir(parents=True)
        old, recent = captures / "old.0@1.log", captures / "recent.0@1.log"
        long_ago = time.time() - 25 * 3600
        for path in (old, recent, logs / "agent.log"):
            path.write_text("left")
        for path in (old, logs):
            os.utime(path, (long_ago, long_ago))
        await running.client.submit(shell_task("one", ASK))
        async with running.node():
            await running.client.wait(["one"], timeout=60)
        assert not old.exists()
        assert not logs.exists()
        assert recent.read_text() == "left"


async def test_clearing_one_session_away_leaves_those_with_similar_names(tmp_path: Path) -> None:
    gate = asyncio.Event()
    script: list[Script] = [Answer("Slow.", gate=gate), Answer("Slow.", gate=gate), "Quick."]
    async with system(tmp_path / "data", script) as running, running.node():
        # The session a.0.1 of the task a.0 is at work while the session a.0 of the task a is cleared away.
        await running.client.submit(shell_task("a.0", ASK, samples=2))
        await eventually(lambda: len(running.engine.requests) == 2)
        await running.client.submit(shell_task("a", ASK))
        await running.client.wait(["a"], timeout=60)
        gate.set()
        results = await running.client.wait(["a.0"], timeout=60)
    assert [(result.status, result.reward) for result in results] == [(SessionStatus.COMPLETED, 1.0)] * 2
