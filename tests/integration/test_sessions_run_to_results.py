"""A session always ends in a result, and what its agent sampled is in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.views import Leases
from polar.recordings import recording
from polar.recordings.recording import Recording
from polar.trajectory.materialise import materialise
from tests.fakes.scripted_engine import Answer, logprob_of
from tests.systems import ASK, TALK, System, seats_taken, shell_task, system


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[System]:
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        yield running


async def result_of(running: System, task_id: str) -> SessionResult:
    (result,) = await running.client.wait([task_id], timeout=60)
    return result


async def recording_of(running: System, session_id: str) -> Recording:
    return recording.decode(await running.client.recording(session_id))


async def test_an_agent_s_call_becomes_a_scored_trace_with_the_sampled_tokens(small: System) -> None:
    await small.client.submit(shell_task("one", ASK))
    async with small.node():
        result = await result_of(small, "one")
    assert (result.status, result.agent_end, result.exit_code) == (
        SessionStatus.COMPLETED,
        AgentEnd.EXITED,
        0,
    )
    assert result.reward == 1.0
    kept = await recording_of(small, result.session_id)
    (ref,) = kept.trajectory.traces
    trace = materialise(kept.trajectory, ref)
    sampled = small.engine.encode("A fine answer.")
    assert trace.prompt_ids.tolist() == small.engine.requests[0].prompt_ids
    assert trace.response_ids.tolist() == sampled
    assert trace.logprobs.tolist() == [logprob_of(token) for token in sampled]
    assert trace.loss_mask.all()
    assert trace.reward == 1.0


async def test_a_completed_session_says_where_branches_leave_it(small: System) -> None:
    branching = {"at": {"name": "uniform", "options": {"count": 4}}}
    unscored = {"evaluator": {"name": "command", "options": {"command": "echo maybe", "reward": "stated"}}}
    changes: dict[str, dict[str, Any]] = {"talk": {}, "plain": {"branching": None}, "unscored": unscored}
    for id, change in changes.items():
        await small.client.submit(shell_task(id, TALK, **{"branching": branching, **change}))
    async with small.node():
        results = await small.client.wait(list(changes), timeout=60)
    samples = {result.task_id: result for result in results if result.sample == 0}
    assert samples["unscored"].status is SessionStatus.FAILED
    chosen = {id: result.branch_at for id, result in samples.items()}
    assert chosen == {"talk": (1,), "plain": (), "unscored": ()}
    assert not any(result.branch_at for result in results if result.sample > 0), "its depth is 1"


async def test_an_agent_that_runs_out_of_time_still_yields_traces_and_a_score(small: System) -> None:
    await small.client.submit(shell_task("slow", ASK + "sleep 600", budgets={"run_seconds": 6}))
    async with small.node():
        result = await result_of(small, "slow")
    assert (result.status, result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.TIMEOUT)
    assert result.reward == 1.0
    assert result.stats.traces == 1


async def test_a_spent_budget_ends_the_agent_and_keeps_what_it_did(small: System) -> None:
    task = shell_task("greedy", ASK + ASK + ASK + "sleep 600", budgets={"max_completions": 2})
    await small.client.submit(task)
    async with small.node():
        result = await result_of(small, "greedy")
    assert (result.status, result.agent_end) == (SessionStatus.COMPLETED, AgentEnd.BUDGET)
    assert result.stats.completions == 2
    assert result.stats.trainable_tokens == result.stats.sampled_tokens > 0


async def test_a_crashing_agent_is_scored_by_what_it_left(small: System) -> None:
    await small.client.submit(shell_task("crash", ASK + "kill -SEGV $$"))
    async with small.node():
        result = await result_of(small, "crash")
    assert (result.status, result.reward) == (SessionStatus.COMPLETED, 1.0)
    assert result.exit_code != 0


async def test_an_evaluator_without_a_verdict_fails_the_session_but_keeps_its_recording(
    small: System,
) -> None:
    evaluator = {"name": "command", "options": {"command": "echo maybe", "reward": "stated"}}
    await small.client.submit(shell_task("unjudged", ASK, evaluator=evaluator))
    async with small.node():
        result = await result_of(small, "unjudged")
    assert result.status is SessionStatus.FAILED
    assert result.error
    assert len((await recording_of(small, result.session_id)).completions) == 1


async def test_the_evaluator_runs_after_every_process_of_the_agent_is_gone(small: System) -> None:
    lingering = ASK + "setsid sh -c 'while :; do echo still here >> alive.txt; sleep 0.05; done' &"
    check = "a=$(wc -c < alive.txt); sleep 0.4; b=$(wc -c < alive.txt); test $a = $b"
    await small.client.submit(
        shell_task(
            "daemon",
            lingering + "\nsleep 0.3",
            evaluator={"name": "command", "options": {"command": check}},
        )
    )
    async with small.node():
        result = await result_of(small, "daemon")
    assert result.reward == 1.0


async def test_a_cancelled_session_ends_its_agent_and_frees_its_place(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with system(tmp_path / "data", [Answer("Never given whole.", gate=gate, gate_at=2)]) as running:
        await running.client.submit(shell_task("endless", ASK))
        async with running.node():
            await running.engine.waiting.wait()
            await running.client.cancel("endless")
            result = await result_of(running, "endless")
            assert result.status is SessionStatus.CANCELLED
            assert result.stats.excluded == {"cancelled": 2}
            running.engine.script = ["Now."]
            await running.client.submit(shell_task("next", ASK))
            assert (await result_of(running, "next")).reward == 1.0


async def test_a_node_that_stops_gives_its_sessions_back_uncounted(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with system(tmp_path / "data", [Answer("Late.", gate=gate)]) as running:
        await running.client.submit(shell_task("moved", ASK))
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        view = await running.client.session("moved.0")
        assert (view.status, view.attempt) == (SessionStatus.QUEUED, 0)
        gate.set()
        async with running.node(name="second"):
            result = await result_of(running, "moved")
        assert (result.status, result.reward, result.attempt) == (SessionStatus.COMPLETED, 1.0, 1)


async def test_a_node_that_stops_asks_for_no_work_while_it_gives_some_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The open request would get it again, and take it to its grave."""
    async with system(tmp_path / "data", [Answer("Late.", gate=asyncio.Event())]) as running:
        lease, release = running.client.lease, running.client.release
        asking: set[object] = set()
        asks_again = asyncio.Event()
        open_at_release: list[int] = []

        async def watched_lease(*arguments: Any) -> Leases:
            asking.add(request := object())
            if running.engine.waiting.is_set():
                asks_again.set()
            try:
                return await lease(*arguments)
            finally:
                asking.remove(request)

        async def watched_release(*arguments: Any) -> None:
            open_at_release.append(len(asking))
            await release(*arguments)

        monkeypatch.setattr(running.client, "lease", watched_lease)
        monkeypatch.setattr(running.client, "release", watched_release)
        async with running.node():
            await running.client.submit(shell_task("first", ASK))
            await running.engine.waiting.wait()
            await running.client.submit(shell_task("second", ASK))
            await asyncio.wait_for(asks_again.wait(), 60)
    assert open_at_release
    assert not any(open_at_release)


async def test_many_samples_pass_through_small_pools_and_leave_nothing_behind(small: System) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    await small.client.submit(shell_task("many", ASK, samples=12))
    async with small.node(init_workers=1, ready_buffer=1, run_slots=2, postrun_workers=1) as node:
        results = await small.client.wait(["many"], timeout=120)
    assert [result.reward for result in results] == [1.0] * 12
    assert {result.sample for result in results} == set(range(12))
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before
    assert await seats_taken(node) == 0
    assert not list((small.data_dir / "nodes/local/captures").iterdir())
    assert not list((small.data_dir / "nodes/local/sessions").glob("*/workspace"))


async def test_a_failing_sandbox_names_its_reason(small: System) -> None:
    await small.client.submit(shell_task("lost", "polar-no-such-command-anywhere"))
    async with small.node():
        result = await result_of(small, "lost")
    assert (result.status, result.exit_code, result.reward) == (SessionStatus.COMPLETED, 127, 0.0)
