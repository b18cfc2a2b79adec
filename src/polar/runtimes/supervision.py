"""Runs commands under the supervisor: nothing they start outlives them, the call, or the node."""

from __future__ import annotations

import asyncio
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import cache_from_source
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from polar.runtimes import supervisor
from polar.runtimes.base import Limit, SandboxError, SandboxUnavailable
from polar.runtimes.cgroups import usable_hierarchies
from polar.runtimes.processes import ProcessIdentity

SEND_SECONDS = 10.0
"""How long it may take to take an order: it does nothing but fork."""

_SOURCE = Path(supervisor.__file__)
_COMPILED = Path(cache_from_source(str(_SOURCE)))
_PROGRAM = str(_COMPILED if _COMPILED.is_file() else _SOURCE)
"""Compiled, where importing it has left it so: Python does not keep what it compiles of a script."""


class Template:
    """A running supervisor program; it ends with this process, and what it forked does too."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None
        self._starting = Lock()

    def order(self, descriptors: list[int]) -> None:
        """Have a supervisor forked that gets these descriptors; OSError if the machine cannot."""
        with self._starting:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._begin()
            assert self._orders is not None
            try:
                socket.send_fds(self._orders, [b"order"], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                # It was killed a moment ago.
                self._begin()
                socket.send_fds(self._orders, [b"order"], descriptors)
            except TimeoutError:
                raise SandboxUnavailable(
                    f"process {self._process and self._process.pid}, which starts commands, does not answer",
                    hint="was it stopped?",
                ) from None

    def _begin(self) -> None:
        # A control group of version 2 that is to have groups below it must be asked before it has
        # a second process.
        usable_hierarchies()
        if self._orders is not None:
            self._orders.close()
        if self._process is not None and self._owner == os.getpid():
            self._process.wait()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._orders.settimeout(SEND_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                cwd="/",
                # Ctrl-C in a terminal is for the node alone; it ends its sandboxes in order.
                start_new_session=True,
            )
        self._owner = os.getpid()


template = Template()


GRACE_SECONDS = 2.0
"""How long a command that ran out of time may take to end by itself."""
END_SECONDS = 30.0
"""How long killed processes may take to be gone before that is an error (they hang in the kernel)."""


def staged_path(number: int) -> Path:
    """Where the command finds the staged source of this number."""
    return Path(supervisor.STAGE, str(number))


@dataclass(frozen=True, slots=True)
class Launch:
    """One command as the host starts it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    stdin: bytes | None
    """None: nothing comes, but it stays open for as long as the node lives."""
    stdout: Path
    stderr: Path
    output_limit: int
    """Bytes of each output stream that are kept."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Resource limits by name (core, nofile, …)."""
    label: str = ""
    """What the sandbox knows the command by."""
    closed_network_ports: tuple[int, ...] = ()
    """Run in a network of its own, of which only listeners on these loopback ports are handed out."""
    inherited: tuple[bytes, ...] = ()
    """Contents of files that the command finds open as descriptors 3, 4, …."""
    staged: tuple[Path, ...] = ()
    """What the command finds as `staged_path(0)`, `staged_path(1)`, … whoever it runs as; for root alone."""
    user: int | None = None
    """The user and group that the command runs as, if not the node's."""
    groups: tuple[str, ...] = ()
    """Control groups to join before anything else is done, by the file to write to."""
    watched: Mapping[Limit, int] = field(default_factory=dict)
    """Limits for the supervisor to keep by looking: memory, pids and disk."""
    directories: tuple[Path, ...] = ()
    """Whose size is watched."""
    is_wrapped: bool = False
    """The command is a sandbox's own process, which shall not be asked to end, only its content."""


class Supervised:
    """A running command; `ended` is done once neither it nor anything it started is left."""

    def __init__(self, launch: Launch, pids: Path) -> None:
        """Start the command; `pids` gets a file that names its supervisor as long as it lives."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._stdin_end, stdin = _open_stdin(launch)
        try:
            with theirs, stdin:
                _order_supervisor(launch, theirs, stdin)
        except BaseException:
            self._control.close()
            if self._stdin_end:
                self._stdin_end.close()
            raise
        self._pids = pids
        self._pid: int | None = None
        self._life: int | None = None
        """A pidfd of the supervisor."""
        self._listeners: asyncio.Future[list[socket.socket]] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._watch())
        """The exit code, negative for a signal."""
        self.label = launch.label
        self.exceeded: Limit | None = None
        """The watched limit that ended the command."""

    def terminate(self) -> None:
        """Ask everything to end, and end it after the grace period."""
        self._send(b"terminate")

    def kill(self) -> None:
        self._send(b"kill")

    async def listeners(self) -> list[socket.socket]:
        """The listening sockets inside the command's closed network; the caller's own to close.

        There are none once the command has ended: nobody is left to connect to them.
        """
        either: set[asyncio.Future[Any]] = {self._listeners, self.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self.ended.done():
            return [listener.dup() for listener in self._listeners.result()]
        self.ended.result()
        if not self._listeners.done():
            raise SandboxError("the sandbox ended before its network was ready")
        return []

    async def run(self, timeout: float) -> tuple[int, bool]:
        """The exit code, and whether the timeout ended the command. Cancelling kills before it returns."""
        try:
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(self.ended), False
            except TimeoutError:
                self.terminate()
                return await asyncio.wait_for(asyncio.shield(self.ended), GRACE_SECONDS + END_SECONDS), True
        except TimeoutError:
            raise SandboxError(f"process {self._pid} could not be ended") from None
        finally:
            if not self.ended.done():
                await self.end()

    async def end(self) -> None:
        """Kill, and wait until nothing is left, however it came to its end."""
        self.kill()
        done, _ = await asyncio.wait({self.ended}, timeout=END_SECONDS)
        if not done:
            raise SandboxError(f"process {self._pid} could not be ended")
        if not self.ended.cancelled():
            # Its supervisor may have been killed too. Whoever wants the end does not mind, and nobody else
            # is going to ask.
            self.ended.exception()

    def _send(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError:
            return  # It has already ended.

    async def _watch(self) -> int:
        pid_file = None
        try:
            while True:
                message, descriptors = await _receive(self._control)
                match message.split(b" ", 1):
                    case [b"began", pid]:
                        (self._life,) = descriptors
                        self._pid = int(pid)
                        pid_file = _record(self._pid, self._pids)
                    case [b"listening"]:
                        self._listeners.set_result([socket.socket(fileno=number) for number in descriptors])
                    case [b"exit", rest]:
                        code, _, exceeded = rest.decode().partition(" ")
                        self.exceeded = Limit(exceeded) if exceeded else None
                        return int(code)
                    case [b"failed", reason]:
                        raise SandboxError(f"the command could not be started: {reason.decode()}")
                    case _:
                        raise SandboxUnavailable(
                            "the command's supervisor was killed", hint="is memory short?"
                        )
        finally:
            self._control.close()
            if self._stdin_end:
                self._stdin_end.close()
            if self._life is not None:
                await _readable(self._life)
                os.close(self._life)
            if pid_file:
                pid_file.unlink(missing_ok=True)
            if self._listeners.done():
                for listener in self._listeners.result():
                    listener.close()


def _record(pid: int, directory: Path) -> Path | None:
    """Name the supervisor for a later life of the node; nothing if it has already ended."""
    identity = ProcessIdentity.of(pid)
    try:
        return identity.save(directory) if identity else None
    except OSError as error:
        raise SandboxError(f"a command could not be started: {directory}: {error.strerror}") from None


def _open_stdin(launch: Launch) -> tuple[BinaryIO | None, BinaryIO]:
    """The node's end of a command's stdin, if it has one, and the command's."""
    if launch.stdin is not None:
        return None, _memory_file(launch.stdin)
    command_end, node_end = os.pipe()
    return os.fdopen(node_end, "wb"), os.fdopen(command_end, "rb")


def _order_supervisor(launch: Launch, control: socket.socket, stdin: BinaryIO) -> None:
    request = marshal.dumps(
        {
            "argv": [os.fsencode(argument) for argument in launch.argv],
            "env": {os.fsencode(name): os.fsencode(value) for name, value in launch.env.items()},
            "cwd": str(launch.cwd),
            "limits": dict(launch.limits),
            "output_limit": launch.output_limit,
            "grace": GRACE_SECONDS,
            "closed_network_ports": list(launch.closed_network_ports),
            "is_wrapped": launch.is_wrapped,
            "staged": [str(path) for path in launch.staged],
            "user": launch.user,
            "groups": list(launch.groups),
            "watched": {str(limit): value for limit, value in launch.watched.items()},
            "directories": [str(path) for path in launch.directories],
        }
    )
    with ExitStack() as stack:
        stdout, stderr = (stack.enter_context(path.open("wb")) for path in (launch.stdout, launch.stderr))
        passed = [stack.enter_context(_memory_file(data)) for data in (request, *launch.inherited)]
        template.order([control.fileno(), *(file.fileno() for file in (stdin, stdout, stderr, *passed))])


def _memory_file(data: bytes) -> BinaryIO:
    file = os.fdopen(os.memfd_create("polar"), "w+b")
    file.write(data)
    file.seek(0)
    return file


async def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next message with the descriptors that came along; empty once the other side is gone."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 65536, supervisor.MAX_DESCRIPTORS)
            return message, descriptors
        except BlockingIOError:
            await _readable(control.fileno())
        except ConnectionResetError:
            return b"", []


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read, which of a pidfd there is when its process has ended."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(descriptor, readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
