"""The commands against a real rollout server: submit, watch, cancel, show and export."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner, Result

from polar.cli.main import app
from polar.client import AsyncClient, Client
from polar.config.settings import ServerSettings
from polar.models.delivery import Delivery
from polar.models.session import ReplayReport, SessionResult, SessionStatus
from polar.models.task import Run, RunKind
from polar.models.views import LeaseRequest, ResultPage
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import result_of
from tests.fakes.recordings import encoded, recording

TOKEN = "a-token-for-this-test"


@dataclass
class Served:
    """A server in a thread of its own, and the command line pointed at it."""

    url: str
    tmp_path: Path
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.environment = {"POLAR_SERVER": self.url, "POLAR_TOKEN": TOKEN}

    def polar(self, *arguments: object, stdin: str | None = None) -> Result:
        return CliRunner().invoke(app, [*map(str, arguments)], input=stdin, env=self.environment)

    def ok(self, *arguments: object, stdin: str | None = None) -> str:
        result = self.polar(*arguments, stdin=stdin)
        assert result.exit_code == 0, result.output + repr(result.exception)
        return result.stdout

    def task_file(self, *ids: str, samples: int = 2) -> Path:
        path = self.tmp_path / "tasks.yaml"
        defaults = {
            "harness": {"name": "shell", "options": {"command": "true"}},
            "evaluator": {"name": "command", "options": {"command": "true"}},
            "runtime": "process",
            "samples": samples,
            "metadata": {"set": "test"},
        }
        tasks = [{"id": task_id, "instruction": "do it"} for task_id in ids]
        path.write_text(yaml.safe_dump({"defaults": defaults, "tasks": tasks}))
        return path

    def run_sessions(self, count: int = 100, *, failing: int = 0, wait_seconds: float = 0) -> None:
        """Take up to `count` sessions as a node does, and deliver what came of them."""
        asyncio.run(self._run_sessions(count, failing, wait_seconds))

    async def _run_sessions(self, count: int, failing: int, wait_seconds: float) -> None:
        request = LeaseRequest(max_sessions=count, wait_seconds=wait_seconds, runtimes=("process",))
        async with AsyncClient(self.url, TOKEN) as client:
            for place, lease in enumerate((await client.lease("node", request)).leases):
                identity = {"session_id": lease.session_id, "task_id": lease.task.id}
                about = {**identity, "sample": lease.sample, "attempt": lease.attempt}
                data = None
                if place < failing:
                    result = SessionResult.model_validate(
                        {**about, "status": SessionStatus.FAILED, "error": "no sandbox"}
                    )
                else:
                    made = recording(lease.session_id)
                    replay = lease.origin and ReplayReport(origin=lease.origin.session_id, calls=3)
                    result = made.result.model_copy(update={**about, "replay": replay})
                    data = encoded(replace(made, result=result))
                delivery = Delivery(key=lease.key, result=result, recording=data)
                assert await client.deliver("node", [delivery]) == [None]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    started = threading.Event()
    address: list[str] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        ended = asyncio.Event()
        stop.append((asyncio.get_running_loop(), ended))
        async with (
            Store.open(tmp_path / "data") as store,
            RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        ):
            address.append(server.url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    try:
        yield Served(address[0], tmp_path)
    finally:
        loop, ended = stop[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@contextmanager
def node_at_work(served: Served, **how: Any) -> Iterator[None]:
    thread = threading.Thread(target=served.run_sessions, kwargs=how)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_submitted_tasks_are_listed_and_shown(served: Served) -> None:
    submitted = served.ok("submit", served.task_file("one", "two"))
    assert "2 tasks with 4 sessions submitted" in submitted
    assert [task["spec"]["id"] for task in lines(served.ok("tasks", "--json"))] == ["one", "two"]
    assert len(lines(served.ok("sessions", "--task", "one", "--json"))) == 2
    shown = served.ok("tasks", "show", "one")
    assert "do it" in shown
    assert "2 queued" in shown
    assert json.loads(served.ok("tasks", "show", "two", "--json"))["spec"]["metadata"] == {"set": "test"}


def test_submitting_again_is_safe_and_other_content_is_refused(served: Served) -> None:
    served.ok("submit", served.task_file("one"))
    again = served.ok("submit", served.task_file("one"))
    assert "1 task with 2 sessions already there: nothing new was submitted" in again
    assert len(lines(served.ok("tasks", "--json"))) == 1
    more = served.ok("submit", served.task_file("one", "two", "three"))
    assert "2 tasks with 4 sessions submitted, 1 task with 2 sessions already there" in more
    refused = served.polar("submit", served.task_file("zero", "one", samples=3))
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1
    assert "one" in refused.stderr
    # All of a batch or nothing: `zero` was not submitted either.
    assert len(lines(served.ok("tasks", "--json"))) == 3


def test_a_session_is_branched_and_replayed(served: Served) -> None:
    served.ok("submit", served.task_file("one", samples=1))
    refused = served.polar("branch", "one.0", "--at", 1)
    assert refused.exit_code == 1
    assert "session 'one.0' is queued: it has no recording before it has ended" in refused.stderr
    served.run_sessions()
    with node_at_work(served, wait_seconds=30):
        branches = lines(served.ok("branch", "one.0", "--at", 1, "--samples", 2, "--json"))
    assert [one["id"] for one in branches] == ["one.1", "one.2"]
    assert "branch of one.0 after 1 call; agent exited" in served.ok("sessions", "--task", "one")
    with node_at_work(served, wait_seconds=30):
        replayed = served.ok("replay", "one.1")
    assert "it replays to the end" in replayed
    assert len(lines(served.ok("tasks", "--json"))) == 2
    beyond = served.polar("replay", "one.0", "--until", 9)
    assert beyond.exit_code == 1
    assert "calls: session 'one.0' has 3 model calls, not 9" in beyond.stderr


def test_nothing_is_submitted_when_one_task_is_wrong(served: Served) -> None:
    file = served.task_file("one", "two")
    file.write_text(file.read_text().replace("id: two", "id: two\n  samples: 0"))
    assert served.polar("submit", file).exit_code == 1
    assert served.ok("tasks", "--json") == ""


def test_tasks_come_from_standard_input(served: Served) -> None:
    text = served.task_file("piped").read_text()
    (task,) = lines(served.ok("submit", "-", "--json", stdin=text))
    assert task["status"] == "queued"


def test_tasks_and_sessions_are_cancelled(served: Served) -> None:
    served.ok("submit", served.task_file("one", "two"))
    assert json.loads(served.ok("tasks", "cancel", "one", "--json"))["status"] == "cancelled"
    session = lines(served.ok("sessions", "--task", "two", "--json"))[0]
    assert "cancelled" in served.ok("sessions", "cancel", session["id"])
    cancelled = lines(served.ok("sessions", "--status", "cancelled", "--json"))
    assert len(cancelled) == 3
    assert lines(served.ok("tasks", "--status", "cancelled", "--json"))[0]["spec"]["id"] == "one"


def test_what_is_not_cancelled_at_once_is_said(served: Served) -> None:
    served.ok("submit", served.task_file("one"))

    async def begin() -> None:
        async with AsyncClient(served.url, TOKEN) as client:
            await client.lease("node", LeaseRequest(max_sessions=1, wait_seconds=0, runtimes=("process",)))

    asyncio.run(begin())
    assert "1 session is being cancelled" in served.ok("sessions", "cancel", "one.0")
    assert "1 session is being cancelled" in served.ok("tasks", "cancel", "one")
    served.ok("submit", served.task_file("two", samples=1))
    served.run_sessions()
    for ended in (("sessions", "two.0"), ("tasks", "two")):
        command, name = ended
        assert "nothing was cancelled: it had ended already" in served.ok(command, "cancel", name)
        assert "cancelled" not in served.ok(command, "show", name)
    served.ok("submit", served.task_file("three", samples=1))
    assert "being cancelled" not in served.ok("tasks", "cancel", "three")


def test_wait_says_why_sessions_failed_and_exits_with_1(served: Served) -> None:
    file = served.task_file("one", "two")
    served.ok("submit", file)
    served.run_sessions(failing=3)
    waited = served.polar("submit", file, "--wait")
    assert waited.exit_code == 1
    assert waited.stderr == "3 of 4 sessions failed:\n  3 × no sandbox\n"
    assert "finished" in waited.stdout
    machine = served.polar("submit", file, "--wait", "--json")
    assert (machine.exit_code, len(lines(machine.stdout))) == (1, 2)


def test_wait_stays_until_every_session_has_ended(served: Served) -> None:
    file = served.task_file("one", "two")
    served.ok("submit", file)
    with node_at_work(served):
        waited = lines(served.ok("submit", file, "--wait", "--json"))
    assert [(task["status"], task["mean_reward"]) for task in waited] == [("finished", 1.0)] * 2


def test_a_session_is_shown_by_its_id_and_kept_as_a_file(served: Served, tmp_path: Path) -> None:
    served.ok("submit", served.task_file("one", samples=1))
    (session,) = lines(served.ok("sessions", "--json"))
    early = served.polar("show", session["id"])
    assert early.exit_code == 1
    assert "is queued: it has no recording yet" in early.stderr
    served.run_sessions()
    kept = tmp_path / "kept.rec"
    online = served.ok("show", session["id"], "--save", kept)
    assert "reward 1 (exists 0.3, right 0.7)" in " ".join(online.split())
    assert CliRunner().invoke(app, ["show", str(kept)]).stdout == online
    absent = served.polar("show", "no-such-session")
    assert absent.exit_code == 1
    assert absent.stderr.count("\n") == 1


def test_a_session_is_verified_by_its_id(served: Served) -> None:
    served.ok("submit", served.task_file("one", samples=1))
    (session,) = lines(served.ok("sessions", "--json"))
    assert "it has no recording yet" in served.polar("verify", session["id"]).stderr
    served.run_sessions()
    found = json.loads(served.ok("verify", session["id"], "--no-replay", "--json"))
    assert [one["name"] for one in found["sessions"]] == [session["id"]]
    assert found["total"]["passed"]


def test_results_are_printed_and_exported(served: Served, tmp_path: Path) -> None:
    served.ok("submit", served.task_file("one", "two"))
    served.run_sessions(failing=1)
    assert len(lines(served.ok("results", "--json"))) == 4
    assert "no sandbox" in served.ok("results")
    written = json.loads(served.ok("results", "--out", tmp_path / "all", "--json"))
    assert (written["sessions"], written["traces"], written["trainable_tokens"]) == (4, 6, 63)
    traces = pd.read_parquet(tmp_path / "all" / "traces.parquet")
    assert traces["loss_mask"].map(sum).sum() == 63
    sessions = pd.read_parquet(tmp_path / "all" / "sessions.parquet")
    assert sessions["metadata"].map(json.loads).tolist() == [{"set": "test"}] * 4
    served.ok("results", "--out", tmp_path / "one", "--task", "one")
    assert set(pd.read_parquet(tmp_path / "one" / "sessions.parquet")["task_id"]) == {"one"}
    told = json.loads(
        served.ok("results", "--out", tmp_path / "atif", "--format", "atif", "--task", "two", "--json")
    )
    assert (told["sessions"], told["without_calls"], told["files"]) == (2, 0, [str(tmp_path / "atif")])
    found = [json.loads(path.read_text()) for path in (tmp_path / "atif").iterdir()]
    assert {one["extra"]["result"]["task_id"] for one in found} == {"two"}
    assert found[0]["agent"]["name"] == found[1]["agent"]["name"] != ""
    refused = served.polar("results", "--out", served.task_file("one"))
    assert refused.exit_code == 1
    assert "is a file, not a directory" in refused.stderr


def test_follow_ends_with_the_tasks_it_names(served: Served, tmp_path: Path) -> None:
    served.ok("submit", served.task_file("one"))
    with node_at_work(served):
        served.ok("results", "--follow", "--task", "one", "--out", tmp_path / "out")
    assert len(pd.read_parquet(tmp_path / "out" / "sessions.parquet")) == 2


def test_an_interrupted_follow_keeps_what_came(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.ok("submit", served.task_file("one"))
    served.run_sessions(1)
    feed = Client.result_pages

    def interrupted(*arguments: Any, **options: Any) -> Iterator[ResultPage]:
        for page in feed(*arguments, **options):
            yield page
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Client, "result_pages", interrupted)
    written = json.loads(served.ok("results", "--follow", "--json", "--out", tmp_path / "out"))
    assert written["sessions"] == 1
    assert len(pd.read_parquet(tmp_path / "out" / "sessions.parquet")) == 1
    assert sorted(os.listdir(tmp_path / "out")) == ["sessions.parquet", "traces.parquet"]


def test_follow_prints_results_as_they_come_until_interrupted(served: Served) -> None:
    served.ok("submit", served.task_file("one"))
    served.run_sessions(1)
    command = [sys.executable, "-m", "polar", "results", "--follow", "--json"]
    with subprocess.Popen(command, env=os.environ | served.environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["status"] == "completed"
        served.run_sessions(1)
        assert json.loads(process.stdout.readline())["status"] == "completed"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_an_interrupted_wait_says_what_goes_on_and_how_to_come_back(served: Served) -> None:
    command = [sys.executable, "-m", "polar", "submit", str(served.task_file("one")), "--wait"]
    with subprocess.Popen(command, env=os.environ | served.environment, stderr=subprocess.PIPE) as process:
        with Client(served.url, TOKEN) as client:
            while not list(client.tasks()):
                assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"what was submitted goes on" in said
    assert b"the same command waits for it again" in said
    assert b"polar tasks cancel TASK" in said
    assert b"Traceback" not in said


def test_harness_and_samples_are_laid_over_every_task(served: Served) -> None:
    file, options = served.task_file("one", "two"), "shell:{command: 'false'}"
    views = served.ok("submit", file, "--harness", options, "--samples", "3", "--json").splitlines()
    specs = [json.loads(view)["spec"] for view in views]
    harness = {"name": "shell", "options": {"command": "false"}}
    assert [(spec["harness"], spec["samples"]) for spec in specs] == [(harness, 3)] * 2


def test_what_is_submitted_together_is_a_run(served: Served) -> None:
    file = served.task_file("one", "two")
    assert f"; run: {file.parent.name}-2" in served.ok("submit", file)
    assert "; run: mine" in served.ok("submit", served.task_file("one", "three"), "--run", "mine")
    served.run_sessions(2)
    mine, first = lines(served.ok("runs", "--json"))
    assert (mine["name"], mine["kind"], mine["tasks"]) == ("mine", "submission", 1)
    assert first["sessions"] == {"completed": 2, "queued": 2}
    assert "mine" in served.ok("runs", "--kind", "submission")
    assert served.ok("runs", "--kind", "training", "--json") == ""
    of_run = lines(served.ok("sessions", "--run", "mine", "--json"))
    assert [session["id"] for session in of_run] == ["three.0", "three.1"]


def test_a_run_is_submitted_again_as_another(served: Served) -> None:
    served.ok("submit", served.task_file("one", "two", samples=1), "--run", "first")
    served.run_sessions()
    with Client(served.url, TOKEN) as client:
        client.replay("one.0")
    options = ("--harness", "shell:{command: 'false'}", "--samples", 3, "--run", "second")
    served.ok("submit", "--again", "first", *options)
    again = [line["spec"] for line in lines(served.ok("tasks", "--json")) if line["spec"]["samples"] == 3]
    assert [spec["id"].partition("-")[0] for spec in again] == ["one", "two"]
    assert {spec["run"]["name"] for spec in again} == {"second"}
    assert {spec["harness"]["options"]["command"] for spec in again} == {"false"}
    assert "nothing new" in served.ok("submit", "--again", "first", *options)
    third = served.ok("submit", "--again", "second")
    assert "2 tasks with 6 sessions submitted; run: second-2" in third


def test_only_submissions_are_submitted_again(served: Served) -> None:
    assert "no run 'none'" in served.polar("submit", "--again", "none").stderr
    assert "expected FILE... or --again RUN" in served.polar("submit").stderr
    misnamed = served.polar("submit", served.task_file("one"), "--run", "no name")
    assert "--run 'no name': not a name" in misnamed.stderr
    both = served.polar("submit", served.task_file("one"), "--again", "none")
    assert "expected FILE... or --again RUN" in both.stderr
    with Client(served.url, TOKEN) as client:
        client.begin_run(Run(name="grpo", kind=RunKind.TRAINING))
    assert "run 'grpo' is of kind training" in served.polar("submit", "--again", "grpo").stderr


def test_a_harness_that_is_none_is_one_line(served: Served) -> None:
    refused = served.polar("submit", served.task_file("one"), "--harness", "claude-code")
    assert refused.exit_code == 1
    assert "claude_code" in refused.stderr


def test_a_wrong_token_is_one_line(served: Served) -> None:
    wrong = served.tmp_path / "wrong.token"
    wrong.write_text("not-the-right-token")
    refused = served.polar("tasks", "--token-file", str(wrong))
    assert refused.exit_code == 1
    assert refused.stderr.count("\n") == 1
    assert "refused the token" in refused.stderr


def test_a_long_list_is_read_to_its_end(served: Served) -> None:
    with Client(served.url, TOKEN) as client:
        assert client.health().status == "ok"
    served.ok("submit", served.task_file("many", samples=450))
    assert len(lines(served.ok("sessions", "--json"))) == 450


def test_kept_files_are_listed_printed_and_unpacked(served: Served) -> None:
    served.ok("submit", served.task_file("one", samples=1))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("logs/agent.stdout", "all done\n")

    async def deliver() -> None:
        async with AsyncClient(served.url, TOKEN) as client:
            request = LeaseRequest(max_sessions=1, wait_seconds=0, runtimes=("process",))
            (lease,) = (await client.lease("node", request)).leases
            result = result_of(lease, has_artifacts=True)
            delivery = Delivery(key=lease.key, result=result, artifacts=packed.getvalue())
            assert await client.deliver("node", [delivery]) == [None]

    asyncio.run(deliver())
    assert "logs/agent.stdout" in served.ok("artifacts", "one.0")
    assert served.ok("artifacts", "one.0", "logs/agent.stdout") == "all done\n"
    served.ok("artifacts", "one.0", "--out", served.tmp_path / "kept")
    assert (served.tmp_path / "kept/logs/agent.stdout").read_text() == "all done\n"
    again = served.polar("artifacts", "one.0", "--out", served.tmp_path / "kept")
    assert (again.exit_code, "exists already" in again.output) == (1, True)
    assert "polar artifacts one.0 lists them" in served.polar("artifacts", "one.0", "nothing").output
    stages = served.ok("sessions", "show", "one.0")
    assert "init" in stages
    assert "completed" in stages


def test_mistakes_against_a_server_are_explained(served: Served) -> None:
    for arguments, said in (
        (("sessions", "--run", "nosuch"), "no run 'nosuch' (`polar runs` lists them)"),
        (("sessions", "--task", "nosuch"), "no task 'nosuch' (`polar tasks` lists them)"),
        (("sessions", "--server", f"{served.url}/v1"), "unless a proxy serves it below a path"),
        (("show", "greet.99"), "no session 'greet.99' (`polar sessions` lists them)"),
        (("submit", "--again", "nosuch"), "no run 'nosuch'"),
    ):
        result = served.polar(*arguments)
        assert result.exit_code == 1
        assert said in result.stderr
        assert len(result.stderr.splitlines()) == 1
