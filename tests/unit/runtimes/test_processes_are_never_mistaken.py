"""A pid file ends the process it names and nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar.runtimes import processes
from polar.runtimes.base import Host
from polar.runtimes.local import reap_sandboxes
from polar.runtimes.processes import ProcessIdentity, end_strays, signal_inside


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def test_process_is_ended_by_its_identity(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    assert identity is not None
    loaded = ProcessIdentity.load(identity.save(tmp_path))
    assert loaded == identity
    assert loaded.end(grace=5.0)
    assert sleeper.wait() == -signal.SIGTERM
    assert ProcessIdentity.of(sleeper.pid) is None
    assert not loaded.end(grace=5.0)


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another"}])
def test_recycled_pid_is_left_alone(
    change: dict[str, Any], sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    identity = ProcessIdentity.of(sleeper.pid)
    assert identity is not None
    pids = tmp_path / "sessions" / "s1" / "pids"
    pids.mkdir(parents=True)
    replace(identity, **change).save(pids)
    assert reap_sandboxes(Host(tmp_path)) == 1
    assert sleeper.poll() is None
    assert not pids.parent.exists()


def test_older_processes_are_signalled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that waits for a child hears of its own end before the child is gone."""
    told: list[int] = []

    def note(descriptor: int, _: signal.Signals) -> None:
        described = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        told.append(int(described.partition("Pid:")[2].split()[0]))

    monkeypatch.setattr(processes, "send_signal", note)
    init = ProcessIdentity.of(os.getpid())
    assert init is not None
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(40)]
        for process in started:
            stack.callback(process.kill)
        signal_inside({process.pid for process in started}, init, signal.SIGTERM)
    assert told == sorted(process.pid for process in started)


def test_unfinished_pid_file_does_not_stop_the_reaping(tmp_path: Path) -> None:
    pids = tmp_path / "sessions" / "s1" / "pids"
    pids.mkdir(parents=True)
    (pids / "12.json").write_text('{"pid": 12')
    (pids / "13.json").write_text("[]")
    assert reap_sandboxes(Host(tmp_path)) == 1


def test_reaping_leaves_what_is_no_sandbox(tmp_path: Path) -> None:
    sessions = tmp_path / "sessions"
    (sessions / "kept").mkdir(parents=True)
    (sessions / "file").touch()
    (sessions / "link").symlink_to(sessions / "kept")
    assert reap_sandboxes(Host(tmp_path)) == 0
    assert {path.name for path in sessions.iterdir()} == {"kept", "file", "link"}
    assert reap_sandboxes(Host(tmp_path / "absent")) == 0


async def test_strays_are_found_by_their_sandbox_only(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    stray = await asyncio.create_subprocess_exec("sleep", "600", env={"POLAR_SANDBOX": str(tmp_path / "a")})
    assert end_strays(tmp_path / "b") == 0
    assert end_strays(tmp_path / "a") == 1
    assert await stray.wait() == -signal.SIGKILL
    assert sleeper.poll() is None
