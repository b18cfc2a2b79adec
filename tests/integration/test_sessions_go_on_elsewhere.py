"""A session whose node is lost or stopped goes on elsewhere: no answer is sampled twice, and none is lost."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import update

from polar.app.verification import verify
from polar.models.completion import HARNESS_VERSION, REPLAYED, RESUMED
from polar.models.session import AgentEnd, SessionResult, SessionStatus
from polar.models.task import OnDivergence
from polar.recordings import recording
from polar.recordings.capture import parse_capture
from polar.store.store import Store
from polar.store.tables import captures
from tests.fakes.scripted_engine import Answer, Script
from tests.systems import ASK, TURNS, System, install_shell, shell_task, system
from tests.waiting import eventually


async def reached(running: System, session_id: str, status: SessionStatus) -> None:
    async def is_there() -> bool:
        return (await running.client.session(session_id)).status is status

    await eventually(is_there)


async def has_answers(running: System, session_id: str, count: int) -> bool:
    """Whether the server has these answers of the running session."""
    captured = await running.captured(session_id)
    return len(parse_capture(captured, running.data_dir).completions) >= count if captured else False


async def assert_went_on(running: System, result: SessionResult, answers: list[str], resumed: int) -> None:
    """The recording holds these answers, the first ones from earlier attempts, and all are trained."""
    assert (result.status, result.error, result.reward) == (SessionStatus.COMPLETED, None, 1.0)
    recorded = recording.decode(await running.client.recording(result.session_id))
    assert [it.response.content for it in recorded.completions] == answers
    assert [RESUMED in it.extra for it in recorded.completions] == [
        place < resumed for place in range(len(answers))
    ]
    assert result.replay is not None
    assert (result.replay.origin, result.replay.calls) == (result.session_id, resumed)
    assert (result.replay.divergence_count, result.replay.unused_calls) == (0, 0)
    assert (result.stats.completions, result.stats.excluded) == (len(answers), {})
    assert result.stats.sampled_tokens == result.stats.trainable_tokens
    assert not await running.captured(result.session_id)


async def test_a_session_of_a_node_that_is_stopped_goes_on_on_the_next(tmp_path: Path) -> None:
    script: list[Script] = ["One.", "Two.", Answer("Never.", gate=asyncio.Event()), "Three.", "Four."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("moved", TURNS))
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        assert await running.captured("moved.0")
        async with running.node(name="second"):
            (result,) = await running.client.wait(["moved"], timeout=120)
        assert result.attempt == 1
        await assert_went_on(running, result, ["One.", "Two.", "Three.", "Four."], resumed=2)
        assert len(running.engine.requests) == 5


async def test_a_session_whose_node_falls_silent_twice_loses_only_its_calls_in_flight(tmp_path: Path) -> None:
    script: list[Script] = ["One.", Answer("Never.", gate=asyncio.Event()), "Two."]
    script += [Answer("Never.", gate=asyncio.Event()), "Three.", "Four."]
    async with system(tmp_path / "data", script) as running, running.node():
        await running.client.submit(shell_task("back", TURNS))
        for answers in (1, 2):
            await running.engine.waiting.wait()
            running.engine.waiting.clear()
            await eventually(partial(has_answers, running, "back.0", answers))
            await running.lose_leases()
        (result,) = await running.client.wait(["back"], timeout=120)
        assert result.attempt == 1
        await assert_went_on(running, result, ["One.", "Two.", "Three.", "Four."], resumed=2)
        assert len(running.engine.requests) == 6


async def test_a_session_that_dies_while_it_is_replayed_still_has_all(tmp_path: Path) -> None:
    """The second attempt ends before its agent has asked for anything."""
    script: list[Script] = ["One.", "Two.", Answer("Never.", gate=asyncio.Event()), "Three.", "Four."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("twice", f"test -f {tmp_path}/go || sleep 60\n{TURNS}"))
        (tmp_path / "go").touch()
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        (tmp_path / "go").unlink()
        async with running.node(name="second"):
            await reached(running, "twice.0", SessionStatus.RUNNING)
        (tmp_path / "go").touch()
        async with running.node(name="third"):
            (result,) = await running.client.wait(["twice"], timeout=120)
        await assert_went_on(running, result, ["One.", "Two.", "Three.", "Four."], resumed=2)


async def test_a_session_that_is_lost_while_it_is_scored_asks_the_model_nothing_again(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    scoring = f"while [ ! -e {gate} ]; do sleep 0.05; done; test -s answer.txt"
    evaluator = {"name": "command", "options": {"command": scoring}}
    async with system(tmp_path / "data", ["One.", "Two.", "Three.", "Four."]) as running:
        await running.client.submit(shell_task("scored", TURNS, evaluator=evaluator))
        async with running.node(name="first"):
            await reached(running, "scored.0", SessionStatus.POSTRUN)
        gate.touch()
        async with running.node(name="second"):
            (result,) = await running.client.wait(["scored"], timeout=120)
        await assert_went_on(running, result, ["One.", "Two.", "Three.", "Four."], resumed=4)
        assert len(running.engine.requests) == 4


async def test_a_capture_that_cannot_be_read_costs_no_session(tmp_path: Path) -> None:
    script: list[Script] = ["One.", Answer("Never.", gate=asyncio.Event()), "Again."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("anew", ASK + ASK))
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        async with Store.open(running.data_dir) as store:
            change = update(captures).values(data=b"no capture")
            await store.database.write(lambda connection: connection.execute(change) and None)
        async with running.node(name="second"):
            (result,) = await running.client.wait(["anew"], timeout=120)
    assert (result.status, result.replay, result.stats.completions) == (SessionStatus.COMPLETED, None, 2)


async def test_a_session_that_goes_on_with_another_version_of_its_harness_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script: list[Script] = ["One.", "Two.", Answer("Never.", gate=asyncio.Event()), "Three.", "Four."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("moved", TURNS))
        install_shell(monkeypatch, "1.5.0")
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        install_shell(monkeypatch, "1.6.0")
        async with running.node(name="second"):
            (result,) = await running.client.wait(["moved"], timeout=120)
        recorded = recording.decode(await running.client.recording("moved.0"))
    assert (result.reward, result.harness_version) == (1.0, "1.6.0")
    assert result.stats.sampled_tokens == result.stats.trainable_tokens
    assert [it.extra[HARNESS_VERSION] for it in recorded.completions] == ["1.5.0"] * 2 + ["1.6.0"] * 2
    assert result.replay is not None
    assert (result.replay.calls, result.replay.divergence_count) == (2, 1)
    (divergence,) = result.replay.divergences
    assert divergence.call is None
    assert divergence.difference == "Version 1.5.0 of the harness asked, and now version 1.6.0 asks."


async def test_without_captures_on_the_server_a_session_begins_anew(tmp_path: Path) -> None:
    script: list[Script] = ["One.", Answer("Never.", gate=asyncio.Event()), "Again."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("anew", ASK + ASK))
        async with running.node(name="first", resume_bytes=0):
            await running.engine.waiting.wait()
        assert not await running.captured("anew.0")
        async with running.node(name="second"):
            (result,) = await running.client.wait(["anew"], timeout=120)
    assert (result.status, result.replay, result.stats.completions) == (SessionStatus.COMPLETED, None, 2)


async def test_a_branch_continues_with_what_it_began_with_and_what_it_sampled(tmp_path: Path) -> None:
    script: list[Script] = ["One.", "Two.", "Three.", "Four."]
    script += ["Other three.", Answer("Never.", gate=asyncio.Event()), "Other four."]
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("tree", TURNS))
        async with running.node(name="first"):
            await running.client.wait(["tree"], timeout=120)
            await running.client.branch("tree.0", 2)
            await running.engine.waiting.wait()
        async with running.node(name="second"):
            _, result = await running.client.wait(["tree"], timeout=120)
        recorded = recording.decode(await running.client.recording("tree.1"))
        answers = [it.response.content for it in recorded.completions]
        assert answers == ["One.", "Two.", "Other three.", "Other four."]
        assert [REPLAYED in it.extra for it in recorded.completions] == [True, True, False, False]
        trained = sum(it.sampled_tokens for it in recorded.completions[2:])
        assert (result.session_id, result.stats.trainable_tokens) == ("tree.1", trained)
        assert result.replay is not None
        assert (result.replay.origin, result.replay.calls) == ("tree.1", 3)
        assert len(running.engine.requests) == 7


def changing(turn: int, file: Path) -> str:
    """The agent of four turns, which says after one of them what is in a file."""
    said = f'(open("{file}").read() if turn == {turn} else f"And then, {{turn}}?")'
    return TURNS.replace('f"And then, {turn}?"', said)


async def test_a_replay_that_left_its_recording_says_so_from_any_node(tmp_path: Path) -> None:
    script: list[Script] = ["One.", "Two.", "Three.", "Four."]
    script += ["Other three.", Answer("Never.", gate=asyncio.Event()), "Other four."]
    file = tmp_path / "said"
    file.write_text("alpha")
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("tree", changing(1, file)))
        async with running.node(name="first"):
            await running.client.wait(["tree"], timeout=120)
            file.write_text("beta")
            view = await running.client.replay("tree.0", on_divergence=OnDivergence.LIVE)
            await running.engine.waiting.wait()
        async with running.node(name="second"):
            (result,) = await running.client.wait([view.task_id], timeout=120)
        recorded = recording.decode(await running.client.recording(view.id))
    assert [it.response.content for it in recorded.completions] == [
        "One.",
        "Two.",
        "Other three.",
        "Other four.",
    ]
    report = result.replay
    assert report is not None
    assert (report.calls, report.divergence_count, report.unused_calls) == (3, 1, 2)
    assert [(one.call, "+beta" in one.difference) for one in report.divergences] == [(2, True)]
    assert not report.is_faithful


async def test_a_branch_that_is_to_stop_where_it_leaves_its_recording_does_so_on_any_node(
    tmp_path: Path,
) -> None:
    script: list[Script] = ["One.", "Two.", "Three.", "Four."]
    script += ["Other three.", Answer("Never.", gate=asyncio.Event())]
    file = tmp_path / "said"
    file.write_text("alpha")
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("tree", changing(0, file)))
        async with running.node(name="first"):
            await running.client.wait(["tree"], timeout=120)
            await running.client.branch("tree.0", 2, on_divergence=OnDivergence.STOP)
            await running.engine.waiting.wait()
        file.write_text("beta")
        async with running.node(name="second"):
            _, result = await running.client.wait(["tree"], timeout=120)
    assert result.agent_end is AgentEnd.REPLAYED
    three = result.stats.excluded["superseded_by_resume"]
    assert result.stats.sampled_tokens == three + result.stats.excluded["replayed"]
    assert three > 0


async def test_answers_that_a_later_attempt_does_not_ask_for_are_counted_and_not_trained(
    tmp_path: Path,
) -> None:
    script: list[Script] = ["One.", "Two.", "Three.", Answer("Never.", gate=asyncio.Event())]
    script += ["New two.", "New three.", "New four."]
    file = tmp_path / "said"
    file.write_text("alpha")
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("turned", changing(0, file)))
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        file.write_text("beta")
        async with running.node(name="second"):
            (result,) = await running.client.wait(["turned"], timeout=120)
        recorded = recording.decode(await running.client.recording("turned.0"))
    trained = ["One.", "New two.", "New three.", "New four."]
    assert [it.response.content for it in recorded.completions] == [*trained, "Two.", "Three."]
    superseded = sum(it.sampled_tokens for it in recorded.completions[4:])
    assert result.stats.excluded == {"superseded_by_resume": superseded}
    assert not (await verify("turned.0", recorded, None, None, print)).problems
    assert result.stats.traces == 1
    assert result.stats.trainable_tokens == sum(it.sampled_tokens for it in recorded.completions[:4])
    assert result.replay is not None
    assert (result.replay.divergence_count, result.replay.unused_calls) == (1, 2)


async def test_an_attempt_whose_agent_cannot_start_keeps_what_earlier_ones_captured(tmp_path: Path) -> None:
    script: list[Script] = ["One.", "Two.", Answer("Never.", gate=asyncio.Event())]
    file = tmp_path / "there"
    file.touch()
    async with system(tmp_path / "data", script) as running:
        await running.client.submit(shell_task("kept", TURNS, prepare=[{"exec": f"test -e {file}"}]))
        async with running.node(name="first"):
            await running.engine.waiting.wait()
        file.unlink()
        async with running.node(name="second"):
            (result,) = await running.client.wait(["kept"], timeout=120)
        recorded = recording.decode(await running.client.recording("kept.0"))
    assert (result.status, result.agent_end) == (SessionStatus.FAILED, AgentEnd.NOT_STARTED)
    assert [it.response.content for it in recorded.completions if it.sampled_tokens] == ["One.", "Two."]
    assert result.stats.sampled_tokens == sum(it.sampled_tokens for it in recorded.completions)
