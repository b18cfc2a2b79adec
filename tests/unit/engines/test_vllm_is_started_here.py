"""`engine.kind: vllm` without a URL starts vLLM, says how, explains failures and leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from polar.app.doctor import Severity, machine_findings
from polar.app.stack import connect_engine
from polar.config.settings import EngineSettings, Settings
from polar.engines import guard, process
from polar.engines.base import EngineError
from polar.engines.process import started_engine
from polar.errors import InvalidInput, NotInstalled
from tests.fakes.vllm_program import FakeVllm, fake_vllm

MODEL = "/models/some-model"
VLLM = EngineSettings(kind="vllm", model=MODEL, device="cpu")


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    monkeypatch.setenv("PATH", str(tmp_path))
    return fake_vllm(tmp_path)


def settings(tmp_path: Path, engine: EngineSettings) -> Settings:
    return Settings(data_dir=tmp_path / "data", engine=engine)


async def test_it_serves_the_model_with_what_exact_tokens_need(vllm: FakeVllm, tmp_path: Path) -> None:
    said: list[str] = []
    engine = VLLM.model_copy(
        update={"max_context": 4096, "slots": 32, "gpu_memory": 0.5, "options": ("--seed", "7")}
    )
    async with connect_engine(settings(tmp_path, engine), said.append) as client:
        info = await client.model_info()
    assert (info.name, info.max_context) == (MODEL, 4096)
    *arguments, host, _, port, _ = vllm.started["arguments"]
    assert (host, port) == ("--host", "--port")
    options = "--served-model-name /models/some-model --dtype float32 --max-model-len 4096 --max-num-seqs 32"
    options += (
        " --gpu-memory-utilization 0.5 --logprobs-mode processed_logprobs --enable-prefix-caching --seed 7"
    )
    assert " ".join(arguments) == f"serve {MODEL} {options}"
    assert vllm.started["environment"] == {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    assert f"vllm serve {MODEL} {options}" in said[0]
    assert "VLLM_SERVER_DEV_MODE=1" in said[0]


async def test_adapters_have_room_for_their_rank(vllm: FakeVllm, tmp_path: Path) -> None:
    engine = VLLM.model_copy(update={"lora_rank": 20})
    async with started_engine(engine, tmp_path / "engine.log", lambda _step: None):
        pass
    assert "--enable-lora --max-loras 2 --max-lora-rank 32" in " ".join(vllm.started["arguments"])
    assert vllm.started["environment"]["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


async def test_weights_may_come_from_the_trainers_gpu(vllm: FakeVllm, tmp_path: Path) -> None:
    engine = VLLM.model_copy(update={"weight_transfer": "cuda-ipc"})
    async with started_engine(engine, tmp_path / "engine.log", lambda _step: None):
        pass
    assert '--weight-transfer-config {"backend": "ipc"}' in " ".join(vllm.started["arguments"])
    assert vllm.started["environment"]["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


async def test_weights_may_come_over_nccl(vllm: FakeVllm, tmp_path: Path) -> None:
    engine = VLLM.model_copy(update={"weight_transfer": "nccl"})
    async with started_engine(engine, tmp_path / "engine.log", lambda _step: None):
        pass
    assert '--weight-transfer-config {"backend": "nccl"}' in " ".join(vllm.started["arguments"])
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in vllm.started["environment"]


@pytest.mark.skipif(sys.platform != "linux", reason="a port can be kept so on Linux alone")
async def test_its_port_is_nobody_elses_while_it_starts(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PROGRESS_SECONDS", 0.0)
    vllm.plan("loading", seconds=1)
    refused: list[str] = []

    def intrude(step: str) -> None:
        if "loading" in step:
            with socket.socket() as other, pytest.raises(OSError, match="in use") as raised:
                other.bind(("127.0.0.1", int(vllm.started["arguments"][-1])))
            refused.append(str(raised.value))

    async with started_engine(VLLM, tmp_path / "engine.log", intrude):
        assert refused


async def test_its_processes_end_with_the_block(vllm: FakeVllm, tmp_path: Path) -> None:
    async with started_engine(VLLM, tmp_path / "engine.log", lambda _step: None):
        running = [psutil.Process(number) for number in vllm.started["processes"]]
    assert len(running) == 2
    assert not psutil.wait_procs(running, timeout=30)[1]


def test_its_processes_end_with_whoever_asked_for_them(vllm: FakeVllm, tmp_path: Path) -> None:
    """The one that asked is killed, and can do nothing about them."""
    vllm.plan("started", seconds=600)
    asker = "import os, subprocess, sys; subprocess.run([*sys.argv[1:3], str(os.getpid()), *sys.argv[3:]])"
    command = [sys.executable, guard.__file__, str(tmp_path / "vllm"), "serve", MODEL]
    with subprocess.Popen([sys.executable, "-c", asker, *command], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"started\n"
        running = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(running) == 3
    assert not psutil.wait_procs(running, timeout=30)[1]


_ASKED_AT_ONCE = """
import os, signal, subprocess, sys, time
from polar.engines import guard

def popen(*command, **options):
    program = started(*command, **options)
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    return program

started, subprocess.Popen = subprocess.Popen, popen
sys.exit(guard.guard(os.getppid(), sys.argv[1:]))
"""


def test_its_processes_end_when_it_is_asked_to_end_as_soon_as_it_is_started() -> None:
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(
        [sys.executable, "-c", _ASKED_AT_ONCE, "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        running = [psutil.Process(int(process.stdout.readline()))]
        process.stdin.write(b"!")
        process.stdin.close()
        assert process.wait(30) == 128 + signal.SIGTERM
    try:
        assert not psutil.wait_procs(running, timeout=10)[1]
    finally:
        for left in running:
            with suppress(psutil.NoSuchProcess):
                left.kill()


async def test_a_failed_start_says_why_and_what_helps(vllm: FakeVllm, tmp_path: Path) -> None:
    cause = "ValueError: Free memory on device (3.1/139.8 GiB) on startup is less than desired"
    vllm.plan("Initializing", cause, "RuntimeError: Engine core initialization failed.", code=1)
    said: list[str] = []
    with pytest.raises(EngineError, match=r"vLLM did not start: ValueError: Free memory") as failure:
        async with started_engine(VLLM, tmp_path / "engine.log", said.append):
            pass
    assert "engine.gpu_memory" in (failure.value.hint or "")
    assert "RuntimeError: Engine core initialization failed." in said[-1]


async def test_a_start_that_takes_too_long_is_ended(vllm: FakeVllm, tmp_path: Path) -> None:
    vllm.plan("Loading weights", seconds=600)
    slow = VLLM.model_copy(update={"start_seconds": 1.0})
    with pytest.raises(EngineError, match="vLLM was not ready after 1 s") as failure:
        async with started_engine(slow, tmp_path / "engine.log", lambda _step: None):
            pass
    assert "engine.start_seconds" in (failure.value.hint or "")


async def test_a_long_start_shows_what_it_is_at(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PROGRESS_SECONDS", 0.1)
    vllm.plan("Loading weights", seconds=1.0)
    said: list[str] = []
    async with started_engine(VLLM, tmp_path / "engine.log", said.append):
        pass
    assert any(line.startswith("vLLM is starting, ") and line.endswith("Loading weights") for line in said)


async def test_an_engine_that_dies_is_noticed(vllm: FakeVllm, tmp_path: Path) -> None:
    async with started_engine(VLLM, tmp_path / "engine.log", lambda _step: None) as engine:
        psutil.Process(vllm.started["processes"][0]).kill()
        with pytest.raises(EngineError, match=r"vLLM ended by itself \(exit code 137\)"):
            await asyncio.wait_for(engine.watch(), 30)


async def test_a_machine_without_vllm_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInstalled, match="vLLM is not installed") as failure:
        async with connect_engine(settings(tmp_path, VLLM), lambda _step: None):
            pass
    assert "pip install vllm" in (failure.value.hint or "")


async def test_a_machine_without_a_gpu_is_told_what_else_there_is(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_GPU_FILES", ())
    engine = EngineSettings(kind="vllm", model=MODEL)
    with pytest.raises(NotInstalled, match="no GPU is seen") as failure:
        async with connect_engine(settings(tmp_path, engine), lambda _step: None):
            pass
    assert "embedded" in (failure.value.hint or "")


def test_the_doctor_says_whether_it_can_be_started(vllm: FakeVllm, tmp_path: Path) -> None:
    found = {finding.name: finding for finding in machine_findings(settings(tmp_path, VLLM))}
    assert found["vLLM"].detail == f"{tmp_path}/vllm will serve {MODEL}"
    (tmp_path / "vllm").unlink()
    found = {finding.name: finding for finding in machine_findings(settings(tmp_path, VLLM))}
    assert found["vLLM"].level is Severity.PROBLEM
    assert "pip install vllm" in (found["vLLM"].fix or "")


AUTO = EngineSettings(model=MODEL)


async def test_it_is_started_without_being_asked_for_where_there_is_a_gpu(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_GPU_FILES", ("null",))
    said: list[str] = []
    async with connect_engine(settings(tmp_path, AUTO), said.append) as client:
        info = await client.model_info()
    assert info.name == MODEL
    assert vllm.started["arguments"][:2] == ["serve", MODEL]
    assert said[0].startswith("vLLM and a GPU are here: vLLM is started (engine.kind embedded starts")
    found = {finding.name: finding for finding in machine_findings(settings(tmp_path, AUTO))}
    assert found["vLLM"].detail == f"{tmp_path}/vllm will serve {MODEL}"


@pytest.mark.parametrize(
    ("gpu", "installed", "changes", "said"),
    [
        ((), True, {}, []),
        (("null",), True, {"device": "cpu"}, []),
        (("null",), True, {"kind": "embedded"}, []),
        (("null",), False, {}, ["the embedded engine is slow on a GPU: with `pip install vllm`"]),
    ],
    ids=["no GPU", "a CPU is asked for", "embedded is asked for", "no vLLM"],
)
def test_the_embedded_engine_is_started_elsewhere(
    vllm: FakeVllm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpu: tuple[str, ...],
    installed: bool,
    changes: dict[str, str],
    said: list[str],
) -> None:
    monkeypatch.setattr(process, "_GPU_FILES", gpu)
    if not installed:
        (tmp_path / "vllm").unlink()
    heard: list[str] = []
    chosen = process.on_this_machine(AUTO.model_copy(update=changes), heard.append)
    assert chosen.is_embedded
    assert [line.startswith(begin) for line, begin in zip(heard, said, strict=True)] == [True] * len(said)


def test_an_engine_that_is_named_is_left_alone(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_GPU_FILES", ("null",))
    named = EngineSettings(url="http://127.0.0.1:1")
    assert process.on_this_machine(named, lambda _step: None) is named


async def test_other_engines_must_be_named_by_a_url(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot start an engine of kind sglang"):
        async with connect_engine(settings(tmp_path, EngineSettings(kind="sglang")), lambda _step: None):
            pass
