"""The quickstart with real model and harness: it ends well, or on Ctrl-C leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from polar.recordings import recording
from polar.tasksets.files import load_tasks

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "examples" / "quickstart"

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model"), pytest.mark.timeout(600)]


@contextmanager
def quickstart(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`polar quickstart` in an empty directory, ended with the test whatever happens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "polar", "quickstart", str(TASKS), *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"{words!r} never came")


@pytest.mark.parametrize("moment", ["starting the embedded engine", "tasks, 5 sessions", "completed"])
def test_ctrl_c_at_any_moment_leaves_no_process_behind(tmp_path: Path, moment: str) -> None:
    with quickstart(tmp_path, "--samples", "1") as process:
        read_until(process, moment)
        started = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    assert started or moment == "starting the embedded engine"
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    assert not [
        p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])
    ]


def test_the_quickstart_ends_in_scored_traces_and_says_where_they_are(tmp_path: Path) -> None:
    sessions = len(load_tasks(TASKS))
    with quickstart(tmp_path, "--samples", "1") as process:
        output, _ = process.communicate(timeout=500)
        assert process.returncode == 0, output
    assert f"{sessions} ended, 0 failed" in output
    assert re.search(r"mean reward\s+[01]\.\d{3}", output)
    shown = re.search(r"polar show (\S+)", output)
    assert shown
    kept = recording.decode((tmp_path / shown[1]).read_bytes())
    assert kept.trajectory.traces
    assert kept.result.stats.trainable_tokens > 0
    assert not list((tmp_path / ".polar").rglob("workspace"))
