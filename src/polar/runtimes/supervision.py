"""Runs commands under a supervisor, so that nothing they start outlives them, the call, or the node."""

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
"""Time limit for accepting an order: the template only forks."""

_SOURCE = Path(supervisor.__file__)
_COMPILED = Path(cache_from_source(str(_SOURCE)))
_PROGRAM = str(_COMPILED if _COMPILED.is_file() else _SOURCE)
"""The compiled program if importing it has produced one, since Python does not cache scripts."""


class Template:
    """A running supervisor program; it and everything it forked end with this process."""

    def __init__(self) -> None:
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._owner: int | None = None
        self._starting = Lock()

    def order(self, descriptors: list[int]) -> None:
        """Fork a supervisor that gets these descriptors; raise OSError if the machine cannot."""
        with self._starting:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._begin()
            assert self._orders is not None
            try:
                socket.send_fds(self._orders, [b"order"], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                # It was killed just now.
                self._begin()
                socket.send_fds(self._orders, [b"order"], descriptors)
            except TimeoutError:
                raise SandboxUnavailable(
                    f"process {self._process and self._process.pid}, which starts commands, does not respond",
                    hint="check whether it was stopped",
                ) from None

    def _begin(self) -> None:
        # A v2 control group that will have groups below it must be queried before it has
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
                # Ctrl-C in a terminal reaches only the node, which ends its sandboxes in order.
                start_new_session=True,
            )
        self._owner = os.getpid()


template = Template()


GRACE_SECONDS = 2.0
"""Seconds that a command that timed out gets to end by itself."""
END_SECONDS = 30.0
"""Seconds that killed processes may take to disappear before it is an error: they hang in the kernel."""


def staged_path(number: int) -> Path:
    """Return where the command finds the staged source of this number."""
    return Path(supervisor.STAGE, str(number))


@dataclass(frozen=True, slots=True)
class Launch:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    stdin: bytes | None
    """The input; None leaves stdin open and empty until the node ends."""
    stdout: Path
    stderr: Path
    output_limit: int
    """Maximum bytes stored of each output stream."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Resource limits by name (core, nofile, …)."""
    label: str = ""
    """The sandbox's name for the command."""
    closed_network_ports: tuple[int, ...] = ()
    """If set, run in an empty network and return listeners on these loopback ports."""
    inherited: tuple[bytes, ...] = ()
    """Contents of files that the command finds open as descriptors 3, 4, …."""
    staged: tuple[Path, ...] = ()
    """Paths that the command finds as `staged_path(0)`, `staged_path(1)`, … as any user; requires root."""
    user: int | None = None
    """The user and group that the command runs as, if not the node's."""
    groups: tuple[str, ...] = ()
    """Files of control groups to join before anything else."""
    watched: Mapping[Limit, int] = field(default_factory=dict)
    """Limits that the supervisor enforces by polling: memory, pids and disk."""
    directories: tuple[Path, ...] = ()
    is_wrapped: bool = False
    """Whether the command is the sandbox's own process, which only ends with its content."""


class Supervised:
    """A running command; `ended` is done once nothing of it is left."""

    def __init__(self, launch: Launch, pids: Path) -> None:
        """Start the command; `pids` gets a file that names its supervisor while it runs."""
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
        self._listeners: asyncio.Future[list[socket.socket]] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._watch())
        """Resolves to the exit code, negative for a signal."""
        self.label = launch.label
        self.exceeded: Limit | None = None
        """The watched limit that ended the command, if any."""

    def terminate(self) -> None:
        """Ask everything to end, and kill it after the grace period."""
        self._send(b"terminate")

    def kill(self) -> None:
        self._send(b"kill")

    async def listeners(self) -> list[socket.socket]:
        """Return the listening sockets in the command's network, for the caller to close; none once it
        ended."""
        either: set[asyncio.Future[Any]] = {self._listeners, self.ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self.ended.done():
            return [listener.dup() for listener in self._listeners.result()]
        self.ended.result()
        if not self._listeners.done():
            raise SandboxError("the sandbox ended before its network was ready")
        return []

    async def run(self, timeout: float) -> tuple[int, bool]:
        """Return the exit code and whether the command timed out. Cancelling kills it before returning."""
        try:
            try:
                async with asyncio.timeout(timeout):
                    return await asyncio.shield(self.ended), False
            except TimeoutError:
                self.terminate()
                return await asyncio.wait_for(asyncio.shield(self.ended), GRACE_SECONDS + END_SECONDS), True
        except TimeoutError:
            raise SandboxError(f"process {self._pid} cannot be ended") from None
        finally:
            if not self.ended.done():
                await self.end()

    async def end(self) -> None:
        """Kill the command and wait until nothing is left of it."""
        self.kill()
        done, _ = await asyncio.wait({self.ended}, timeout=END_SECONDS)
        if not done:
            raise SandboxError(f"process {self._pid} cannot be ended")
        if not self.ended.cancelled():
            # Its supervisor may have been killed too, which does not matter here, and nobody else
            # will ask.
            self.ended.exception()

    def _send(self, message: bytes) -> None:
        try:
            self._control.send(message)
        except OSError:
            return  # It has ended.

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
                        raise SandboxError(f"cannot start the command: {reason.decode()}")
                    case _:
                        raise SandboxUnavailable(
                            "the command's supervisor was killed",
                            hint="check whether the machine ran out of memory",
                        )
        finally:
            self._control.close()
            if self._stdin_end:
                self._stdin_end.close()
            if self._life is not None:
                await _wait_readable(self._life)
                os.close(self._life)
            if pid_file:
                pid_file.unlink(missing_ok=True)
            if self._listeners.done():
                for listener in self._listeners.result():
                    listener.close()


def _record(pid: int, directory: Path) -> Path | None:
    """Record the supervisor for a restarted node; do nothing if it has ended."""
    identity = ProcessIdentity.of(pid)
    try:
        return identity.save(directory) if identity else None
    except OSError as error:
        raise SandboxError(f"cannot start a command: {directory}: {error.strerror}") from None


def _open_stdin(launch: Launch) -> tuple[BinaryIO | None, BinaryIO]:
    """Return the node's end of a command's stdin, if it has one, and the command's end."""
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
    """Receive the next message with its descriptors; it is empty once the other side has closed."""
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 65536, supervisor.MAX_DESCRIPTORS)
            return message, descriptors
        except BlockingIOError:
            await _wait_readable(control.fileno())
        except ConnectionResetError:
            continue  # It ended before it had read all that it was sent; what it said last is still there.


async def _wait_readable(descriptor: int) -> None:
    """Wait until a descriptor is readable, which a pidfd is when its process has ended."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(descriptor, readable.set_result, None)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
