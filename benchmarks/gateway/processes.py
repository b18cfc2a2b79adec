"""Starts what is measured and what measures it, each in a process of its own on loopback, and ends it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gateway.load import Job
from benchmarks.gateway.peers import LITELLM, RLLM
from benchmarks.gateway.wire import MODEL, Wire

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
END_SECONDS = 20.0
JOB_SECONDS = 240.0
"""The longest any single measurement may take."""


@dataclass(frozen=True, slots=True)
class Target:
    """Something that answers chat completions."""

    ports: Sequence[int]
    pid: int
    sessions: Sequence[tuple[str, str]]
    """Path and key of each."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def memory(self) -> int:
        """Resident bytes of the process and its children."""
        process = psutil.Process(self.pid)
        return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])


@contextmanager
def engine_double(wire: Wire) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "wire.json")
        file.write_text(json.dumps(asdict(wire)))
        with _printing_its_ports([sys.executable, "-m", "benchmarks.gateway.upstream", str(file)]) as (
            process,
            ports,
        ):
            yield Target(ports, process.pid, [("/v1/chat/completions", "none")])


@contextmanager
def polar(mode: str, engine: Target, sessions: int, gateways: int = 1) -> Iterator[Target]:
    """As many gateways as a machine with that many nodes has; each session is asked for at one of them."""
    with ExitStack() as stack:
        started = []
        for _ in range(gateways):
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            command = [
                sys.executable,
                "-m",
                "benchmarks.gateway.ours",
                mode,
                engine.url,
                str(sessions),
                directory,
            ]
            started.append(stack.enter_context(_printing_its_ports(command)))
        keys = [("/v1/chat/completions", f"polar-bench-{number}") for number in range(sessions)]
        yield Target([ports[0] for _, ports in started], started[0][0].pid, keys)


@contextmanager
def rllm(engine: Target, sessions: int) -> Iterator[Target]:
    """With its defaults: it asks the engine for token ids and keeps every call in its SQLite file."""
    with tempfile.TemporaryDirectory() as directory:
        port = _free_port()
        command = RLLM.command(
            *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
            *("--worker", f"{engine.url}/v1", "--db-path", f"{directory}/calls.db"),
        )
        with _answering(command, port, "/health", Path(directory)) as process:
            paths = [(f"/sessions/s{number}/v1/chat/completions", "none") for number in range(sessions)]
            yield Target([port], process.pid, paths)


_LITELLM_RECORDER = """
import json
from litellm.integrations.custom_logger import CustomLogger

class Recorder(CustomLogger):
    def __init__(self):
        super().__init__()
        self.log = open("calls.jsonl", "a")

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        call = {"messages": kwargs["messages"], "response": response_obj.model_dump()}
        print(json.dumps(call, default=str), file=self.log)

recorder = Recorder()
"""
"""What a user adds to have every call kept: the least that a callback can do."""


@contextmanager
def litellm(engine: Target) -> Iterator[Target]:
    """With what keeps tokens: it asks the engine for ids and logprobs, and a callback writes calls to a file.

    One worker, its default; no database, no keys, logging off.
    """
    with tempfile.TemporaryDirectory() as directory:
        port = _free_port()
        served = {
            "model": f"hosted_vllm/{MODEL}",
            "api_base": f"{engine.url}/v1",
            "api_key": "none",
            "logprobs": True,
            "extra_body": {"return_token_ids": True},
        }
        Path(directory, "recording.py").write_text(_LITELLM_RECORDER)
        config = Path(directory, "litellm.json")  # JSON is YAML
        settings = {
            "model_list": [{"model_name": MODEL, "litellm_params": served}],
            "litellm_settings": {"callbacks": ["recording.recorder"]},
            "general_settings": {"dangerously_permit_weak_or_unset_master_key": True},
        }
        config.write_text(json.dumps(settings))
        command = LITELLM.command(
            *("--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
        )
        with _answering(command, port, "/health/liveliness", Path(directory)) as process:
            yield Target([port], process.pid, [("/v1/chat/completions", "none")])


def measured(job: Job) -> dict[str, Any]:
    """The load generator's result."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gateway.load"],
        input=json.dumps(asdict(job)) + "\n",
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=JOB_SECONDS,
        check=True,
    )
    result: dict[str, Any] = json.loads(run.stdout)
    return result


@contextmanager
def streams_open(job: Job) -> Iterator[None]:
    """The job's streams, open while the body runs; they end by themselves afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gateway.load"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(job)) + "\n")
        process.stdin.flush()
        if process.stdout.readline() != "open\n":
            raise SystemExit("the streams did not open")
        yield
        process.communicate(timeout=JOB_SECONDS)
    finally:
        _end(process)


def tell(engine: Target, path: str, body: Any = None) -> Any:
    """Ask the engine double for something that no engine offers."""
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"{engine.url}{path}", data, timeout=10) as answer:
        return json.load(answer)


@contextmanager
def _printing_its_ports(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        word, *ports = process.stdout.readline().split()
        if word != "ready":
            raise SystemExit(f"{' '.join(command)} did not start")
        yield process, [int(port) for port in ports]
    finally:
        _end(process)


@contextmanager
def _answering(
    command: Sequence[str], port: int, path: str, directory: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A program of others, once it answers at a path; it writes its log and other files to the directory."""
    log = directory / "log"
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "HOME": str(directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=directory, env={**os.environ, **settings}
        )
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(port, path):
            if time.monotonic() > until or process.poll() is not None:
                raise SystemExit(f"{command[1]} did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield process
    finally:
        _end(process)


def _answers(port: int, path: str) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5).close()
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
