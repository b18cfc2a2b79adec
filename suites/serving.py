"""Commands of Polar as a suite runs them: `polar serve` and `polar engine`, and a session in the server."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import polar
from polar.models.completion import Completion
from polar.models.session import SessionResult
from polar.recordings import recording
from tests.systems import shell_task
from tests.waiting import eventually_sync

START_SECONDS = 300
SESSION_SECONDS = 900
MAX_CONTEXT = 4096


def write_settings(directory: Path, **engine: Any) -> None:
    """Write a polar.yaml that commands started in the directory find."""
    own = {"max_context": MAX_CONTEXT, "slots": 2, "start_seconds": START_SECONDS, **engine}
    document = {"engine": own, "node": {"runtimes": ["process"]}}
    (directory / "polar.yaml").write_text(yaml.safe_dump(document))


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[polar.Client]:
    """Run `polar serve` for the block and yield a client of it; what it says is in serve.log."""
    port = _free_port()
    with _command(directory, "serve", "--port", str(port), *arguments):
        token = (directory / ".polar" / "token").read_text().strip()
        with polar.Client(f"http://127.0.0.1:{port}", token) as client:
            yield client


@contextmanager
def running_engine(directory: Path, model: Path) -> Iterator[str]:
    """Run `polar engine` for the block and yield its address."""
    port = _free_port()
    options = ("--model", str(model), "--port", str(port), "--max-context", str(MAX_CONTEXT))
    with _command(directory, "engine", *options):
        yield f"http://127.0.0.1:{port}"


def roll_out(
    client: polar.Client, id: str, agent: str, **changes: Any
) -> tuple[SessionResult, tuple[Completion, ...]]:
    """Run one session of a shell agent; return its result, and its model calls as they were recorded."""
    client.submit(shell_task(id, agent, budgets={"run_seconds": SESSION_SECONDS}, **changes))
    [result] = client.wait([id], timeout=SESSION_SECONDS)
    completions = recording.decode(client.recording(result.session_id)).completions
    for turn in (completion.response for completion in completions):
        print(repr(turn.content), [(call.name, call.arguments) for call in turn.tool_calls])
    print(f"{result.stats.trainable_tokens} of {result.stats.sampled_tokens} tokens trainable")
    return result, tuple(completions)


@contextmanager
def _command(directory: Path, *arguments: str) -> Iterator[None]:
    """Run a command of Polar, from when it says that it serves until the end of the block."""
    written = directory / f"{arguments[0]}.log"
    with written.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "polar", *arguments], cwd=directory, stdout=log, stderr=log, text=True
        )
        try:
            _wait(process, written)
            yield
        finally:
            process.terminate()
            process.wait(60)


def _wait(process: subprocess.Popen[str], log: Path) -> None:
    def is_up() -> bool:
        assert process.poll() is None, f"it did not start: {log.read_text()[-2000:]}"
        return re.search("^(serving|ready) ", log.read_text(), re.MULTILINE) is not None

    eventually_sync(is_up, START_SECONDS)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
