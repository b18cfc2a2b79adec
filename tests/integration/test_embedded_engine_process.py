"""`polar engine` as a process: says when it is ready, and ends when asked to."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.tiny_llama import write_tiny_llama

RUN = [sys.executable, "-c", "from polar.cli.main import main; main()", "engine", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def ready_url(line: str) -> str:
    word, url = line.split()
    assert word == "ready"
    return url


def test_the_engine_says_ready_serves_logs_and_ends_on_sigterm(model: Path, tmp_path: Path) -> None:
    (tmp_path / "polar.yaml").write_text("log_level: debug\n")
    command = [*RUN, "--model", str(model), "--port", "0", "--slots", "2", "--threads", "1"]
    command += ["--log-format", "json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=tmp_path,
    ) as engine:
        assert engine.stdout is not None
        assert engine.stderr is not None
        url = ready_url(engine.stdout.readline())
        with urllib.request.urlopen(f"{url}/health", timeout=10) as response:
            assert response.status == 200
        engine.send_signal(signal.SIGTERM)
        said = [json.loads(line)["message"] for line in engine.stderr]
        assert engine.wait(20) == 0
    assert f"serving at {url}" in said
    assert any(re.fullmatch(r"GET /health: 200 in 0\.\d+ s", message) for message in said)
    assert said[-1] == "asked to end"


def test_a_port_in_use_is_one_line_and_exit_1(model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [*RUN, "--model", str(model), "--port", port]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert run.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_a_model_that_is_not_there_is_one_line_and_exit_1() -> None:
    command = [*RUN, "--model", "./nothing-here", "--port", "0"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment())
    assert run.returncode == 1
    assert "nothing-here" in run.stderr
    assert "Traceback" not in run.stderr
