"""The embedded engine as a child process: apart from the gateway, so that its arithmetic delays no stream."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polar.config.settings import EngineSettings
from polar.engines.base import EngineError

STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """An engine that serves."""

    url: str
    log_file: Path
    _process: asyncio.subprocess.Process

    async def watch(self) -> None:
        """Raise when the engine ends, which it does only when something is wrong."""
        code = await self._process.wait()
        raise EngineError(
            f"the embedded engine ended by itself (exit code {code})", hint=f"see {self.log_file}"
        )


@asynccontextmanager
async def embedded_engine(
    settings: EngineSettings, log_file: Path, *, log_format: str | None = None
) -> AsyncIterator[EngineProcess]:
    """Start the engine, yield it once it serves, end it on the way out; `log_format` as of `Settings`."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *_command(settings, log_format),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield EngineProcess(await _url(process, settings, log_file), log_file, process)
    finally:
        await _stop(process)


def _command(settings: EngineSettings, log_format: str | None) -> list[str]:
    command = [sys.executable, "-m", "polar", "engine", "--exit-with-parent"]
    options = {
        "--model": settings.model,
        "--host": "127.0.0.1",
        "--port": 0,
        "--device": settings.device,
        "--dtype": settings.dtype,
        "--slots": settings.slots,
        "--max-context": settings.max_context,
        "--threads": settings.threads,
        "--log-format": log_format,
    }
    for name, value in options.items():
        if value is not None:
            command += [name, str(value)]
    return command


async def _url(process: asyncio.subprocess.Process, settings: EngineSettings, log_file: Path) -> str:
    """The address from the child's `ready URL` line."""
    assert process.stdout is not None
    try:
        async with asyncio.timeout(settings.start_seconds):
            async for line in process.stdout:
                word, _, url = line.decode().strip().partition(" ")
                if word == "ready":
                    return url
    except TimeoutError:
        raise EngineError(
            f"the embedded engine was not up after {settings.start_seconds:g} s", hint=f"see {log_file}"
        ) from None
    with suppress(TimeoutError):
        # Its output has ended, so it is about to; asyncio must see that before it is sent a signal.
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    reason = lines[-1].removeprefix("error: ") if lines else "it said nothing"
    raise EngineError(f"the embedded engine did not start: {reason}", hint=f"see {log_file}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
