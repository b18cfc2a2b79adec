"""`polar serve` as a user runs it: one command, the real model, one clear line when something is wrong."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import polar
from polar.app.stack import running
from polar.config.settings import EngineSettings, ServerSettings, Settings
from polar.engines.embedded.model import load
from polar.engines.embedded.server import EmbeddedServer
from polar.errors import InvalidInput
from tests.fakes.tiny_llama import write_tiny_llama
from tests.systems import ASK, shell_task

pytestmark = [pytest.mark.model, pytest.mark.xdist_group("model"), pytest.mark.timeout(300)]


@contextmanager
def serve(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "polar", "serve", "--data-dir", str(directory / ".polar"), *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_tasks_are_rolled_out_and_a_signal_ends_everything_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_SERVER", "POLAR_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "polar.yaml").write_text("node: {runtimes: [process]}")
    with serve(tmp_path, "--port", "0", "--warm-start") as process:
        assert process.stdout is not None
        assert any(line.startswith("serving ") for line in process.stdout)
        assert (tmp_path / ".polar/token").stat().st_mode & 0o777 == 0o600
        with polar.Client() as client:
            client.submit(shell_task("hi", ASK, samples=2, sampling={"max_tokens": 8, "seed": 1}))
            results = client.wait(["hi"], timeout=120)
        assert [result.reward for result in results] == [1.0, 1.0]
        assert all(1 <= result.stats.trainable_tokens <= 8 for result in results)
        assert {result.logprobs_mode for result in results} == {"processed_logprobs"}
        assert {result.policy_version_min for result in results} == {1}
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert not (tmp_path / ".polar/server.json").exists()


def test_kill_9_takes_the_engine_along(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0") as process:
        assert process.stdout is not None
        assert any(line.startswith("serving ") for line in process.stdout)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert children
    assert not psutil.wait_procs(children, timeout=30)[1]


def test_an_engine_that_dies_ends_the_command_with_one_line(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0") as process:
        assert process.stdout is not None
        assert any(line.startswith("serving ") for line in process.stdout)
        *_, engine = psutil.Process(process.pid).children(recursive=True)
        engine.kill()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    # What the log says of the model at start is not of its end.
    (said,) = (line for line in errors.strip().splitlines() if " WARNING " not in line)
    assert "the embedded engine ended by itself (exit code 137)" in said


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serve(tmp_path, "--port", str(taken.getsockname()[1])) as process,
    ):
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1
    assert "cannot listen" in errors


def test_a_model_that_cannot_load_is_one_line(tmp_path: Path) -> None:
    with serve(tmp_path, "--port", "0", "--model", str(tmp_path / "none")) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1
    assert errors.startswith("error: ")
    assert "no such directory" in errors


async def test_an_engine_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path / "tiny")
    async with EmbeddedServer(load(EngineSettings(model=str(directory), device="cpu"))) as engine:
        settings = Settings(
            data_dir=tmp_path / "data",
            server=ServerSettings(port=0),
            engine=EngineSettings(url=engine.url, model="smollm2-135m-instruct"),
        )
        with pytest.raises(InvalidInput, match="a different tokenizer"):
            async with running(settings, lambda _step: None):
                pass
