"""A process that is started again whenever it ends, until it is stopped.

Parts are forked from one process that has loaded all of Polar, so that one is back in a moment.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from importlib import import_module
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.waiting import eventually

AGAIN_SECONDS = 0.2
"""Between an end that nobody asked for and the next start, as a supervisor of processes would have it."""
START_SECONDS = 120.0
STOP_SECONDS = 60.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.faults.program", "tests.faults.engine"])


class Part:
    """One server, node or engine: the function `run` of a module, in a directory and with a log."""

    def __init__(
        self, name: str, module: str, arguments: tuple[Any, ...], directory: Path, says: str
    ) -> None:
        self.name = name
        self._work = (module, arguments, directory, directory / f"{name}.log")
        self._log = directory / f"{name}.log"
        self._says = says.encode()
        """In its log once it works."""
        self._process: ForkServerProcess | None = None
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._keeping = asyncio.create_task(self._keep(), name=self.name)

    async def killed(self, seconds: float) -> None:
        """Kill it without warning, let it start again after so long, and wait until it works as before."""
        self._may_run.clear()
        said = self._said()
        self._signal(signal.SIGKILL)
        await asyncio.sleep(seconds)
        self._may_run.set()
        await eventually(lambda: self._said() != said, START_SECONDS, every=0.1)

    async def stop(self, *, kindly: bool) -> int | None:
        """End it for good; the code it ended with."""
        self._may_run.clear()
        self._signal(signal.SIGTERM if kindly else signal.SIGKILL)
        process = self._process
        if process is not None:
            try:
                await asyncio.wait_for(_ended(process), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await _ended(process)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        return None if process is None else process.exitcode

    def _said(self) -> int:
        return self._log.read_bytes().count(self._says) if self._log.exists() else 0

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    async def _keep(self) -> None:
        while True:
            await self._may_run.wait()
            process = _forks.Process(target=_run, args=self._work, name=self.name)
            process.start()
            self._process = process
            await _ended(process)
            await asyncio.sleep(AGAIN_SECONDS)


async def _ended(process: ForkServerProcess) -> None:
    """Until a process has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    # A descriptor of our own, since others may wait for the same process.
    watched = os.dup(process.sentinel)
    loop.add_reader(watched, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)
    process.join()


def _run(module: str, arguments: tuple[Any, ...], directory: Path, log: Path) -> None:
    os.chdir(directory)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for output in (1, 2):
        os.dup2(descriptor, output)
    run: Callable[..., None] = import_module(module).run
    run(*arguments)
