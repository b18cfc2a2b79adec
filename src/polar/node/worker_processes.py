"""Processes that do long work for a node, so that its event loop always has time for the streams it serves.

A worker is started when it is needed, waits for more, and ends with the node, however that ends: its standard
input closes. Functions, arguments and results travel pickled; both ends are the same program.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, TypeVar

from polar.errors import PolarError, Unavailable

T = TypeVar("T")

MOST = 8
"""Workers of a node, at most: each has an interpreter's memory."""
NICENESS = 5
"""How much nicer they are than the node: who is served waits for the node, and nobody for them."""
_LENGTH = struct.Struct("<Q")


class WorkerEnded(Unavailable):
    """A worker died at its work: the system may have killed it for its memory."""


class WorkerProcesses:
    """`await workers.run(function, *arguments)` is what the function returns, or the PolarError it raises."""

    def __init__(self, count: int | None = None) -> None:
        count = count or min(len(os.sched_getaffinity(0)), MOST)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")
        self._idle: list[subprocess.Popen[bytes]] = []

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        result: T = await loop.run_in_executor(self._threads, self._call, function, arguments)
        return result

    def close(self) -> None:
        """End the workers, once those at work are done."""
        self._threads.shutdown(cancel_futures=True)
        while self._idle:
            _end(self._idle.pop())

    def _call(self, function: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
        worker = self._waiting() or _start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            _send(worker.stdin, (function, arguments))
            value, error = _receive(worker.stdout)
        except (EOFError, OSError):
            worker.kill()
            code = worker.wait()
            raise WorkerEnded(f"the process that packs sessions ended with {code}") from None
        self._idle.append(worker)
        if error is not None:
            raise error
        return value

    def _waiting(self) -> subprocess.Popen[bytes] | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "polar.node.worker_processes"]
    # In a session of its own: an interrupt typed at the node is the node's to answer.
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _end(worker: subprocess.Popen[bytes]) -> None:
    assert worker.stdin is not None
    worker.stdin.close()
    worker.wait()


def _send(stream: IO[bytes], message: object) -> None:
    data = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return pickle.loads(_exactly(stream, length))


def _exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


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
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What anybody prints is for the log, not for the node.
    while True:
        try:
            function, arguments = _receive(calls)
        except EOFError:
            return
        _send(answers, _answer(function, arguments))


if __name__ == "__main__":
    main()
