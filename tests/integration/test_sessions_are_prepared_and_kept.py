"""A task's prepare steps run before its agent, and what the agent leaves is kept for people to look at."""

from __future__ import annotations

import asyncio
import io
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polar.config import plugins
from polar.errors import NotFound
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.models.session import AgentEnd, FailureReason, SessionStatus, Verdict
from polar.runtimes.base import Host, Sandbox, SandboxSpec, SandboxUnavailable
from polar.runtimes.process import ProcessRuntime
from tests.fakes.extensions import registered
from tests.sandboxes import require_runtime
from tests.systems import ASK, System, counted, seats_taken, shell_task, system


@pytest.fixture
async def small(tmp_path: Path) -> AsyncIterator[System]:
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        yield running


async def archive_of(running: System, session_id: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(await running.client.artifacts(session_id)))


async def test_prepare_steps_run_in_order_before_the_agent(small: System, tmp_path: Path) -> None:
    source = tmp_path / "shared" / "library"
    (source / "deep").mkdir(parents=True)
    (source / "deep/word.txt").write_text("hello")
    task = shell_task(
        "prepared",
        "cat lib/deep/upper.txt > answer.txt",
        prepare=[
            {"upload": "lib", "source": str(source)},
            {"exec": "tr a-z A-Z < lib/deep/word.txt > lib/deep/upper.txt"},
        ],
        evaluator={"name": "command", "options": {"command": "grep -qx HELLO answer.txt"}},
    )
    await small.client.submit(task)
    async with small.node(upload_roots=(tmp_path / "shared",)):
        (result,) = await small.client.wait(["prepared"], timeout=60)
    assert (result.error, result.reward) == (None, 1.0)


@pytest.mark.sandbox
async def test_samples_of_one_task_share_what_was_prepared_once(small: System) -> None:
    await require_runtime("bubblewrap")
    task = shell_task(
        "shared",
        "cat stamp.txt > answer.txt; echo spoiled > stamp.txt",
        runtime="bubblewrap",
        samples=3,
        prepare=[{"exec": "cat /proc/sys/kernel/random/uuid > stamp.txt"}],
        artifacts=["answer.txt"],
    )
    await small.client.submit(task)
    async with small.node(run_slots=1, ready_buffer=1, init_workers=1):
        results = await small.client.wait(["shared"], timeout=60)
    stamps = {(await archive_of(small, result.session_id)).read("files/answer.txt") for result in results}
    assert [result.error for result in results] == [None] * 3
    assert len(stamps) == 1
    assert not list((small.data_dir / "nodes/local/snapshots").glob("*"))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"exec": "echo not this way >&2; exit 3"}, r"exit code 3 .* not this way"),
        ({"exec": "polar-no-such-command"}, "exit code 127"),
        ({"upload": "x", "source": "/etc/hostname"}, "not below a directory that this node allows"),
        ({"upload": "x", "source": "/no/such/file"}, "not an absolute path that exists"),
        ({"upload": "x", "source": "../outside"}, "not an absolute path that exists"),
    ],
)
async def test_a_failing_prepare_step_fails_the_session_in_init_with_its_message(
    small: System, step: dict[str, str], message: str
) -> None:
    await small.client.submit(shell_task("unprepared", ASK, prepare=[step]))
    async with small.node():
        (result,) = await small.client.wait(["unprepared"], timeout=60)
    assert (result.status, result.agent_end) == (SessionStatus.FAILED, AgentEnd.NOT_STARTED)
    assert result.attempt == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(result.error)


async def test_a_link_in_an_upload_is_refused(small: System, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/secret").symlink_to("/etc/passwd")
    step = {"upload": "x", "source": str(tmp_path / "shared")}
    await small.client.submit(shell_task("linked", ASK, prepare=[step]))
    async with small.node(upload_roots=(tmp_path / "shared",)):
        (result,) = await small.client.wait(["linked"], timeout=60)
    assert "is a link" in (result.error or "")


async def test_logs_declared_files_and_what_did_not_fit_are_in_the_archive(small: System) -> None:
    command = (
        "echo said; echo warned >&2; mkdir out; echo kept > out/a.txt; echo no > b.md; "
        "head -c 300000 /dev/urandom > out/big.bin"
    )
    await small.client.submit(shell_task("artful", command, artifacts=["out/*", "missing/*"]))
    async with small.node(artifact_bytes=100_000):
        (result,) = await small.client.wait(["artful"], timeout=60)
    assert result.has_artifacts
    archive = await archive_of(small, result.session_id)
    assert archive.read("logs/agent.stdout") == b"said\n"
    assert archive.read("logs/agent.stderr") == b"warned\n"
    assert archive.read("files/out/a.txt") == b"kept\n"
    assert b"files/out/big.bin" in archive.read("omitted.txt")
    assert "files/b.md" not in archive.namelist()
    assert not list((small.data_dir / "nodes/local/sessions").iterdir())
    with pytest.raises(NotFound, match="no session"):
        await small.client.artifacts("nobody.0")


async def test_the_agent_s_diff_is_kept_against_its_files_or_its_repository(small: System) -> None:
    given = {"a.txt": {"text": "one\n"}}
    change = "echo two > a.txt; echo new > b.txt"
    repository = "git init -q . && git add . && git -c user.name=t -c user.email=t@t commit -qm first"
    await small.client.submit(shell_task("plain", change, files=given))
    await small.client.submit(shell_task("git", change, files=given, prepare=[{"exec": repository}]))
    async with small.node():
        results = await small.client.wait(["plain", "git"], timeout=60)
    for result in results:
        diff = (await archive_of(small, result.session_id)).read("final.diff").decode()
        assert "-one\n+two\n" in diff
        assert "+new\n" in diff
        assert ".git" not in diff.replace("diff --git", "")


async def test_an_agent_that_stands_in_the_way_of_its_diff_is_scored_all_the_same(small: System) -> None:
    in_the_way = ASK + 'rm -rf "$TMPDIR/polar-before"; ln -s / "$TMPDIR/polar-before"'
    await small.client.submit(shell_task("blocked", in_the_way, files={"one.txt": {"text": "one"}}))
    async with small.node():
        (result,) = await small.client.wait(["blocked"], timeout=60)
    assert (result.status, result.reward) == (SessionStatus.COMPLETED, 1.0)
    assert [warning.partition(":")[0] for warning in result.warnings] == ["artifact final.diff"]
    assert b"final.diff" in (await archive_of(small, result.session_id)).read("omitted.txt")


async def test_every_stage_is_an_event_and_is_measured(small: System) -> None:
    await small.client.submit(shell_task("timed", "true"))
    async with small.node() as node:
        (result,) = await small.client.wait(["timed"], timeout=60)
        numbers = await counted(node)
    events = await small.client.session_events(result.session_id)
    stages = [event.status.value for event in events]
    assert stages == ["init", "ready", "running", "postrun", "completed"]
    assert [event.at for event in events] == sorted(event.at for event in events)
    assert numbers["polar_node_stage_seconds_count", "running"] == 1
    assert numbers["polar_node_sessions_ended_total", "completed"] == 1
    assert numbers["polar_node_pool_occupied", "run"] == 0


async def test_enough_samples_end_the_others_of_their_group(small: System) -> None:
    await small.client.submit(shell_task("group", ASK, samples=8, early_stop=2))
    async with small.node(run_slots=1, ready_buffer=1, init_workers=1):
        results = await small.client.wait(["group"], timeout=60)
    completed = [result for result in results if result.status is SessionStatus.COMPLETED]
    assert 2 <= len(completed) <= 3
    assert {result.status for result in results} == {SessionStatus.COMPLETED, SessionStatus.CANCELLED}


class Flaky(ProcessRuntime):
    failures_left: ClassVar[int] = 0

    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        if Flaky.failures_left:
            Flaky.failures_left -= 1
            raise SandboxUnavailable("no room just now")
        return await super().start(spec, host)


@pytest.mark.parametrize(("failures", "status"), [(2, SessionStatus.COMPLETED), (3, SessionStatus.FAILED)])
async def test_a_passing_failure_of_the_sandbox_is_tried_again_and_counted(
    small: System, monkeypatch: pytest.MonkeyPatch, failures: int, status: SessionStatus
) -> None:
    registered(monkeypatch, "runtimes", flaky=Flaky)
    Flaky.failures_left = failures
    await small.client.submit(shell_task("flaky", ASK, runtime="flaky"))
    async with small.node(runtimes=("flaky",)):
        (result,) = await small.client.wait(["flaky"], timeout=60)
    assert (result.status, result.attempt) == (status, 3)
    if status is SessionStatus.FAILED:
        assert (result.error, result.failure) == ("no room just now", FailureReason.INFRASTRUCTURE)


class Fresh(Evaluator):
    """Scores 1 if the fresh sandbox was there before the agent ended and knows nothing of the agent."""

    wants_fresh_sandbox = True

    async def evaluate(self, context: EvaluationContext) -> Verdict:
        async with context.fresh_sandbox() as first, context.fresh_sandbox() as second:
            assert isinstance(first, Sandbox)
            assert first is not second
            given = await first.download(first.workspace / "given.txt")
            assert given == await second.download(second.workspace / "given.txt") == b"as given"
        return Verdict(reward=1.0)


async def test_the_evaluator_s_fresh_sandbox_is_made_while_the_agent_runs(
    small: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []
    second_start = asyncio.Event()

    class Watched(ProcessRuntime):
        async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
            starts.append(spec.name)
            if len(starts) == 2:
                second_start.set()
            return await super().start(spec, host)

    registered(monkeypatch, "runtimes", watched=Watched)
    registered(monkeypatch, "evaluators", fresh=Fresh)
    wait = "echo spoiled > given.txt; until test -e go; do sleep 0.02; done"
    files: dict[str, Any] = {"given.txt": {"text": "as given"}}
    task = shell_task("fresh", wait, runtime="watched", evaluator="fresh", files=files)
    await small.client.submit(task)
    async with small.node(runtimes=("watched",)):
        await asyncio.wait_for(second_start.wait(), 30)
        assert (await small.client.session("fresh.0")).result is None
        agent_root = small.data_dir / "nodes/local/sessions" / starts[0]
        (workspace,) = [path.parent for path in agent_root.rglob("given.txt")]
        (workspace / "go").touch()
        (result,) = await small.client.wait(["fresh"], timeout=30)
    assert (result.error, result.reward) == (None, 1.0)
    assert len(starts) == 3
    assert not list((small.data_dir / "nodes/local/sessions").iterdir())


async def test_without_a_ready_buffer_a_session_prepares_in_its_run_slot(small: System) -> None:
    await small.client.submit(shell_task("bare", ASK, samples=3))
    async with small.node(ready_buffer=0, run_slots=1) as node:
        results = await small.client.wait(["bare"], timeout=60)
    # Its place in POSTRUN is free a moment after others can see the result: once the node knows it stored.
    assert await seats_taken(node) == 0
    assert [result.reward for result in results] == [1.0] * 3


def test_components_named_in_tests_are_gone_after_them() -> None:
    assert "flaky" not in plugins.names("runtimes")
