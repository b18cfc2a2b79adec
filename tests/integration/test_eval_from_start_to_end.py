"""`polar eval` and `polar compare` as commands: against a server with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from bs4 import BeautifulSoup

from polar.engines.base import GenerateRequest
from polar.evals.report import load_report
from polar.models.session import SessionStatus
from tests.fakes.scripted_engine import Answer
from tests.systems import ASK, TOKEN, system

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model")]


@dataclass
class Scene:
    """A server in a thread of its own, whose engine answers "yes", slowly where it is told to."""

    directory: Path
    url: str
    asked: threading.Event
    """Set when the held answer is waited for."""
    answer: threading.Event
    """Lets it go."""

    def polar(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "polar", *map(str, arguments)],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "POLAR_TOKEN": TOKEN},
        )

    def run(self, *arguments: object, code: int = 0) -> tuple[str, str]:
        with self.polar(*arguments) as process:
            output, errors = process.communicate(timeout=120)
        assert process.returncode == code, output + errors
        return output, errors

    def eval(self, out: str, *arguments: object, code: int = 0) -> tuple[str, str]:
        given = ("eval", "--taskset", "tiny.yaml", "--server", self.url, "--out", out, *arguments)
        return self.run(*given, code=code)

    def sessions(self) -> int:
        """How many the server has run."""
        with (self.directory / "runs").open() as file:
            return len(file.readlines())


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    started, asked, answer = threading.Event(), threading.Event(), threading.Event()
    answer.set()
    urls: list[str] = []
    stop: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        ended, gate = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        stop.append((loop, ended))

        def say(_request: GenerateRequest) -> Answer:
            if answer.is_set():
                return Answer("yes")
            asked.set()
            threading.Thread(target=lambda: answer.wait(60) and loop.call_soon_threadsafe(gate.set)).start()
            return Answer("yes", gate=gate)

        async with system(tmp_path / "data", [say]) as made, made.node():
            urls.append(made.server.url)
            started.set()
            await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert started.wait(60)
    (tmp_path / "runs").touch()
    write_taskset(tmp_path / "tiny.yaml")
    try:
        yield Scene(tmp_path, urls[0], asked, answer)
    finally:
        answer.set()
        loop, ended = stop[0]
        loop.call_soon_threadsafe(ended.set)
        thread.join()


def write_taskset(path: Path, **changes: Any) -> None:
    """Two tasks: one that answers.txt passes, one that nothing passes."""
    count = f"echo x >> {path.parent / 'runs'}; "
    document = {
        "defaults": {
            "instruction": "Say yes.",
            "runtime": "process",
            "allow_no_model_calls": True,
            "harness": {"name": "shell", "options": {"command": count + ASK}},
            "evaluator": {"name": "command", "options": {"command": "grep -q yes answer.txt"}},
            **changes,
        },
        "tasks": [
            {"id": "easy"},
            {"id": "hard", "evaluator": {"name": "command", "options": {"command": "false"}}},
        ],
    }
    path.write_text(yaml.safe_dump(document))


LAZY = "lazy=shell:{command: 'exit 3'}"


def test_two_harnesses_are_evaluated_reported_and_compared(scene: Scene) -> None:
    output, errors = scene.eval("out", "--harness", "own", "--harness", LAZY, "--samples", 2, "--seed", 1)
    assert "report: out/report.html" in output
    assert errors.count("passed\n") == 8
    report = load_report(scene.directory / "out")
    own, lazy = report.cells
    assert (own.harness, lazy.harness, own.model) == ("own", "lazy", "scripted")
    assert own.metrics["pass@1"].value == own.metrics["pass@2"].value == 0.5
    assert lazy.metrics["pass@1"].value == 0.0
    assert own.cost.completions == 4
    assert own.cost.prompt_tokens > own.cost.sampled_tokens > 0
    assert lazy.failures == {"agent made no model call": 4}
    assert own.failures == {"agent finished, reward too low": 2}
    page = BeautifulSoup((scene.directory / "out/report.html").read_text(), "html.parser")
    assert {"own", "lazy"} <= {cell.text.split()[0] for cell in page.select("td")}
    assert len(page.find_all("svg")) == 4
    assert "| easy | 2/2" in (scene.directory / "out/report.md").read_text()

    compared, _ = scene.run(
        "compare",
        "out",
        "out",
        "--before-harness",
        "lazy",
        "--after-harness",
        "own",
        "--out",
        "diff",
        "--json",
    )
    (cells,) = json.loads(compared)["cells"]
    assert cells["outcomes"] == {"both": 0, "only_before": 0, "only_after": 2, "neither": 2}
    assert (scene.directory / "diff/comparison.html").is_file()

    # Ended work is not done again, not even with other gates; and the gate decides the exit code.
    before = scene.sessions()
    harnesses = ("--harness", "own", "--harness", LAZY, "--samples", 2, "--seed", 1)
    gates = ("--fail-under", "pass@1=0.4", "--fail-under", "completed=1")
    output, errors = scene.eval("out", *harnesses, *gates, "--baseline", "out", "--json", code=1)
    assert scene.sessions() == before
    assert "--fail-under: lazy · scripted · tiny: pass@1 is 0.000, below 0.4" in errors
    document = json.loads(output)
    assert len(document["below"]) == 1
    assert [cell["pass_difference"]["value"] for cell in document["comparison"]["cells"]] == [0.0, 0.0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_evaluation_goes_on_where_it_was(scene: Scene, number: signal.Signals) -> None:
    given = ("--server", scene.url, "--taskset", "tiny.yaml", "--samples", 3, "--out", "out")
    scene.answer.clear()
    with scene.polar("eval", *given, "--harness", LAZY, "--harness", "own") as process:
        assert process.stderr is not None
        lines = iter(process.stderr)
        assert any(line.startswith("6/12 ") for line in lines)
        assert scene.asked.wait(60)
        process.send_signal(number)
        last_words = "".join(lines)
        process.wait(30)
    assert process.returncode in (128 + number, -number)
    assert not (scene.directory / "out/report.json").exists()
    assert ("run the same command to resume" in last_words) == (number is signal.SIGINT)
    scene.answer.set()
    _, errors = scene.eval("out", "--samples", 3, "--harness", LAZY, "--harness", "own")
    assert "resuming: 6 of 12 sessions have ended" in errors
    report = load_report(scene.directory / "out")
    assert [attempt.status for cell in report.cells for attempt in cell.attempts] == [
        SessionStatus.COMPLETED
    ] * 12
    assert scene.sessions() == 6
