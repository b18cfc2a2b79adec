"""Processes that do long work for a node, so that its event loop always has time for the streams it serves.

A worker is started when it is needed, waits for more, and ends with the node, however that ends: its standard
input closes. Functions, arguments and results travel pickled; both ends are the same program.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from polar.errors import PolarError, Unavailable

T = TypeVar("T")

MOST = 8
"""Workers of a node, at most: each has an interpreter's memory."""
NICENESS = 5
"""How much nicer they are than the node: who is served waits for the node, and nobody for them."""


class WorkerEnded(Unavailable):
    """A worker died at its work: the system may have killed it for its memory."""


class WorkerProcesses:
    """`await workers.run(function, *arguments)` is what the function returns, or the PolarError it raises."""

    def __init__(self) -> None:
        count = min(len(os.sched_getaffinity(0)), MOST)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._idle: list[_WorkerProcess] = []

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        result: T = await loop.run_in_executor(self._threads, self._call, function, arguments)
        return result

    def close(self) -> None:
        """End the workers, once those at work are done."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            self._idle.pop().end()

    def _call(self, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _WorkerProcess()
        value, error = worker.call(function, arguments)
        self._idle.append(worker)
        if error is not None:
            raise error
        return value


class _WorkerProcess:
    def __init__(self) -> None:
        self._calls, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "polar.node.worker_processes"]
        with theirs:
            # In a session of its own: an interrupt typed at the node is the node's to answer.
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)

    def call(self, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
        try:
            self._calls.send((function, arguments))
            return self._calls.recv()
        except (EOFError, OSError):
            self._process.kill()
            code = self.end()
            raise WorkerEnded(f"the process that packs sessions ended with {code}") from None

    def end(self) -> int:
        self._calls.close()
        return self._process.wait()


def _answer(function: Callable[..., Any], arguments: tuple[object, ...]) -> tuple[Any, Exception | None]:
    try:
        return function(*arguments), None
    except PolarError as error:
        return None, PolarError(error.message, hint=error.hint)
    except Exception as error:
        return None, RuntimeError(repr(error))


def main() -> None:
    """Be a worker: take calls from standard input until it closes."""
    os.nice(NICENESS)
    os.dup2(2, 1)  # What anybody prints is for the log.
    with Connection(os.dup(0)) as calls:
        while True:
            try:
                function, arguments = calls.recv()
            except EOFError:
                return
            calls.send(_answer(function, arguments))


if __name__ == "__main__":
    main()
