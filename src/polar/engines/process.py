"""An engine as a child process: apart from the gateway, so that its arithmetic delays no stream.

It is vLLM where the settings ask for it without naming a URL, or leave the choice where vLLM and a GPU are;
else the embedded engine.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from polar.config.settings import DEFAULT_MODEL, EngineSettings, child_environment
from polar.engines import guard
from polar.engines.base import EngineError
from polar.engines.connections import Connections, Disconnected
from polar.engines.embedded.weights import ensure_model, is_cached
from polar.errors import NotInstalled
from polar.models.session import PROCESSED

STOP_SECONDS = guard.STOP_SECONDS + 5.0
LOOK_SECONDS = 0.2
HEALTH_SECONDS = 5.0
PROGRESS_SECONDS = 15.0
"""How often a start that takes long says what the engine last wrote."""
LAST_LINES = 15
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM takes for --max-lora-rank."""
_GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Below /dev: of NVIDIA, of AMD, and of either in WSL."""
_CAUSES = {
    "Free memory on device": "something else uses the GPU: set a smaller engine.gpu_memory, or end it",
    "out of memory": "set a smaller engine.gpu_memory, or lower engine.max_context",
    "No available memory for the cache": "set a larger engine.gpu_memory",
    "KV cache is needed": "lower engine.max_context, or set a larger engine.gpu_memory",
    "unrecognized arguments": "this vLLM is older than 0.10.2, or engine.options names what it does not know",
    "is not a valid model identifier": "engine.model is a directory or a Hugging Face model id",
}
"""What a line of a log means that says why vLLM did not start."""

Say = Callable[[str], None]
"""Tells the user which step has begun."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How an engine is started; it is told its port last."""

    title: str
    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """What is added to this process's own."""
    causes: Mapping[str, str] = field(default_factory=dict)
    """What helps where a line of its log holds these words."""

    def at(self, port: int) -> list[str]:
        return [*self.arguments, "--host", "127.0.0.1", "--port", str(port)]


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine that is starting or serves."""

    command: EngineCommand
    url: str
    log_file: Path
    _process: asyncio.subprocess.Process

    @property
    def title(self) -> str:
        return self.command.title

    async def watch(self) -> None:
        """Raise when the engine ends, which it does only when something is wrong."""
        code = await self._process.wait()
        raise EngineError(f"{self.title} ended by itself (exit code {code})", hint=f"see {self.log_file}")

    async def ready(self, seconds: float, say: Say) -> None:
        """Return when the engine answers; EngineError if it ends before that or takes longer."""
        loop = asyncio.get_running_loop()
        begun = told_at = loop.time()
        connections = Connections(
            self.url, {}, connect_seconds=HEALTH_SECONDS, silence_seconds=HEALTH_SECONDS
        )
        try:
            while not await _is_healthy(connections):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), LOOK_SECONDS)
                    raise self._failed(say)
                if loop.time() - begun > seconds:
                    raise EngineError(
                        f"{self.title} was not ready after {seconds:g} s",
                        hint=f"see {self.log_file}; engine.start_seconds says how long it may take",
                    )
                if loop.time() - told_at > PROGRESS_SECONDS:
                    told_at = loop.time()
                    last = next(reversed(self._lines()), "nothing in its log yet")
                    say(f"{self.title} is starting, {told_at - begun:.0f} s: {last[:150]}")
        finally:
            connections.close()

    async def stop(self) -> None:
        if self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _failed(self, say: Say) -> EngineError:
        """What the log says of a start that failed."""
        lines = self._lines()
        if len(lines) > 1:
            say("\n  ".join([f"the last lines of {self.log_file}:", *lines[-LAST_LINES:]]))
        for words, hint in self.command.causes.items():
            if cause := next((line for line in lines if words in line), None):
                return EngineError(
                    f"{self.title} did not start: {cause[:300]}", hint=f"{hint}; see {self.log_file}"
                )
        reason = lines[-1].removeprefix("error: ") if lines else "it said nothing"
        return EngineError(f"{self.title} did not start: {reason}", hint=f"see {self.log_file}")

    def _lines(self) -> list[str]:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()]


@asynccontextmanager
async def started_engine(
    settings: EngineSettings, log_file: Path, say: Say, *, log_format: str | None = None
) -> AsyncIterator[EngineProcess]:
    """Start the engine that the settings ask for, yield it once it serves, end it on the way out.

    `log_format` as of `Settings`.
    """
    if settings.is_embedded:
        command = _embedded(settings, log_format, say)
    else:
        command = await asyncio.to_thread(_vllm, settings, say)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with _free_port() as port:
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), *command.at(port)),
                stdin=asyncio.subprocess.DEVNULL,
                # The embedded engine logs to stderr, and says on stdout what is known here.
                stdout=asyncio.subprocess.DEVNULL if settings.is_embedded else log,
                stderr=log,
                env=child_environment(command.environment),
                start_new_session=True,
            )
        engine = EngineProcess(command, f"http://127.0.0.1:{port}", log_file, process)
        try:
            await engine.ready(settings.start_seconds, say)
            yield engine
        finally:
            await engine.stop()


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, though an engine takes long to listen on it: a socket that
    is bound, but does not listen, is only in the way of those that do not ask for this port."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        port: int = kept.getsockname()[1]
        if sys.platform != "linux":
            # Elsewhere it would be in the engine's way, too.
            kept.close()
        yield port


async def _is_healthy(connections: Connections) -> bool:
    try:
        async with asyncio.timeout(HEALTH_SECONDS), connections.request("GET", "/health") as response:
            return response.status == 200
    except (Disconnected, TimeoutError):
        return False


def _embedded(settings: EngineSettings, log_format: str | None, say: Say) -> EngineCommand:
    say(f"starting the embedded engine with {settings.model}")
    if not is_cached(settings.model):
        say("fetching and converting its weights, about a minute, this once")
    options = {
        "--model": settings.model,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--slots": settings.slots,
        "--max-context": settings.max_context,
        "--threads": settings.threads,
        "--log-format": log_format,
    }
    command = [sys.executable, "-m", "polar", "engine", *_given(options), *settings.options]
    return EngineCommand("the embedded engine", command)


def _vllm(settings: EngineSettings, say: Say) -> EngineCommand:
    """`vllm serve` with what exact tokens and weight updates need. Whatever the user passes comes last, and
    so before what stands here."""
    program = vllm_program(settings)
    model = str(ensure_model(settings.model)) if settings.model == DEFAULT_MODEL else settings.model
    usual = "float32" if settings.device == "cpu" else "bfloat16"
    options = {
        "--served-model-name": settings.model,
        "--dtype": usual if settings.dtype == "auto" else settings.dtype,
        "--max-model-len": settings.max_context,
        "--max-num-seqs": settings.slots,
        "--gpu-memory-utilization": settings.gpu_memory,
        "--logprobs-mode": PROCESSED,
    }
    command = [program, "serve", model, *_given(options), "--enable-prefix-caching"]
    # Pauses and weight updates are part of its developer's mode; it listens on this machine alone.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if settings.lora_rank is not None:
        rank = next((rank for rank in LORA_RANKS if rank >= settings.lora_rank), settings.lora_rank)
        command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", str(rank)]
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.record_routing:
        command += ["--enable-return-routed-experts", "--enable-prompt-tokens-details"]
    if settings.weight_transfer == "cuda-ipc":
        command += ["--weight-transfer-config", '{"backend": "ipc"}']
        # Handles of a GPU's memory are no plain values, and come from this machine alone.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if settings.weight_transfer == "nccl":
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    command += settings.options
    said = " ".join([*(f"{name}={value}" for name, value in environment.items()), shlex.join(command)])
    say(f"starting vLLM, which may take minutes: {said}")
    if settings.api_key is not None:
        environment["VLLM_API_KEY"] = settings.api_key
    return EngineCommand("vLLM", command, environment, _CAUSES)


def on_this_machine(settings: EngineSettings, say: Say) -> EngineSettings:
    """The settings with the engine that `auto` is here, where one is to be started: vLLM if that is installed
    and there is a GPU for it, else the embedded engine."""
    if settings.kind != "auto" or settings.urls:
        return settings
    kind = "embedded"
    if settings.device != "cpu" and has_gpu():
        try:
            vllm_program(settings)
            kind = "vllm"
            say("vLLM and a GPU are here: vLLM is started (engine.kind embedded starts the embedded engine)")
        except NotInstalled:
            say("the embedded engine is slow on a GPU: with `pip install vllm` vLLM is started instead")
    return settings.model_copy(update={"kind": kind})


def has_gpu() -> bool:
    return any(any(Path("/dev").glob(name)) for name in _GPU_FILES)


def vllm_program(settings: EngineSettings) -> str:
    """The `vllm` to start; NotInstalled where there is none, or no GPU for it."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise NotInstalled(
            "engine.kind: vLLM is not installed",
            hint="pip install vllm, or put the `vllm` of another environment on the PATH, or name a running"
            " one with engine.url",
        )
    if settings.device != "cpu" and not has_gpu():
        raise NotInstalled(
            "engine.kind: no GPU is seen on this machine for vLLM to use",
            hint="leave engine.kind out for the embedded engine, name a running vLLM with engine.url, or set"
            " engine.device to cpu if vLLM is built for that",
        )
    return found


def _given(options: Mapping[str, object]) -> list[str]:
    return [str(part) for option in options.items() if option[1] is not None for part in option]
