"""`polar eval` with a system of its own for each model, killed and repeated."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from polar.evals.report import load_report
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import ASK, allow_processes

MODELS = ("first", "second")


@pytest.fixture
def engine() -> Iterator[str]:
    """The address of an OpenAI-compatible endpoint that says "yes" to everything."""
    started = threading.Event()
    address: list[str] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        ended = asyncio.Event()
        stop.append((asyncio.get_running_loop(), ended))
        async with vllm_wire(Said("yes")) as wire:
            address.append(wire.url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(30)
    try:
        yield address[0]
    finally:
        loop, ended = stop[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def write_taskset(directory: Path) -> None:
    """Two tasks that tell when they run; the second one waits for a file."""
    tell = f'echo "$POLAR_MODEL $POLAR_INSTRUCTION" >> {directory}/runs; '
    wait = f"while [ ! -e {directory}/go ]; do sleep 0.05; done; "
    document = {
        "defaults": {
            "runtime": "process",
            "evaluator": {"name": "command", "options": {"command": "grep -q yes answer.txt"}},
        },
        "tasks": [
            {
                "id": name,
                "instruction": name,
                "harness": {"name": "shell", "options": {"command": tell + before + ASK}},
            }
            for name, before in (("quick", ""), ("slow", wait))
        ],
    }
    (directory / "tasks.yaml").write_text(yaml.safe_dump(document))


def test_a_killed_evaluation_of_two_models_goes_on_and_ends_everything(tmp_path: Path, engine: str) -> None:
    write_taskset(tmp_path)
    allow_processes(tmp_path)
    models = [option for model in MODELS for option in ("--model", model)]
    command = [sys.executable, "-m", "polar", "eval", "-t", "tasks.yaml", "--out", "out", *models]
    command += ["--engine-url", engine, "--engine-kind", "openai"]
    environment = {**os.environ, "POLAR_ENGINE_KEY": "sk-of-this-test"}
    killed = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    with killed:
        assert killed.stderr is not None
        assert any(line.startswith("1/4 ") for line in killed.stderr)
        children = psutil.Process(killed.pid).children(recursive=True)
        killed.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    psutil.wait_procs(children, timeout=30)

    again = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
    )
    assert again.returncode == 0, again.stderr
    assert "resuming: 1 of 4 sessions have ended" in again.stderr
    report = load_report(tmp_path / "out")
    assert [cell.model for cell in report.cells] == list(MODELS)
    assert [cell.metrics["pass@1"].value for cell in report.cells] == [1.0, 1.0]
    assert all(cell.cost.prompt_tokens > 0 and cell.cost.sampled_tokens > 0 for cell in report.cells)
    runs = (tmp_path / "runs").read_text().splitlines()
    assert runs.count("first quick") == 1
    assert {"first slow", "second quick", "second slow"} <= set(runs)
    assert not list((tmp_path / "out").rglob("server.json"))
    assert "sk-of-this-test" not in "".join(path.read_text() for path in (tmp_path / "out").glob("*.*"))
