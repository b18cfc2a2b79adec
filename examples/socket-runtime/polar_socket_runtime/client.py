"""The runtime `socket`: Polar's sandbox contract over a socket to a server."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from polar.runtimes.allow_list import AllowList
from polar.runtimes.base import (
    MIB,
    Command,
    ExecResult,
    Host,
    Limit,
    Runtime,
    Sandbox,
    SandboxSpec,
    SandboxUnavailable,
    ToolDirectory,
)
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar_socket_runtime.wire import CHUNK, DATA, MESSAGE, STDOUT, Connection, chunks_of, join, parse_message

SOCKET_VARIABLE = "POLAR_SANDBOX_SOCKET"
"""The variable of the node's environment with the server's address, which its operator sets."""


class SocketRuntime(Runtime):
    class Options(BubblewrapRuntime.Options):
        """The server uses bubblewrap, so tasks have the same options."""

    options: Options
    supports_snapshots = True

    @property
    def reaches(self) -> AllowList:
        return self.options.network.allowed

    @classmethod
    async def unavailable(cls) -> str | None:
        try:
            reason: str | None = (await _ask(do="check"))["unavailable"]
        except SandboxUnavailable as error:
            return str(error)
        return reason

    @classmethod
    async def enforcement(cls) -> Mapping[str, str]:
        enforced: Mapping[str, str] = (await _ask(do="check"))["enforcement"]
        return enforced

    async def start(self, spec: SandboxSpec, host: Host) -> Sandbox:
        digests = [await asyncio.to_thread(_digest, tool.source) for tool in spec.tools]
        lifeline = await _connect()
        try:
            await lifeline.send_message(
                do="start",
                node=_node(host),
                name=spec.name,
                base=spec.base,
                options=self.options.model_dump(mode="json"),
                tools=[[digest, str(tool.target)] for digest, tool in zip(digests, spec.tools, strict=True)],
                has_gateway=spec.gateway_port != 0,
            )
            for digest in (await _hear(lifeline))["missing"]:
                await _send_tool(lifeline, spec.tools[digests.index(digest)].source)
            started = await _hear(lifeline)
        except BaseException:
            # The server stops what it has started, and closes the connection when nothing is left.
            lifeline.close_sending()
            await asyncio.shield(lifeline.wait_closed())
            lifeline.close()
            raise
        (host.logs / spec.name).mkdir(mode=0o700, parents=True, exist_ok=True)
        return SocketSandbox(spec, host, lifeline, started)

    async def discard(self, snapshot: str, host: Host) -> None:
        await _ask(do="discard", node=_node(host), snapshot=snapshot)

    @classmethod
    async def reap(cls, host: Host) -> int:
        """Remove snapshots; sandboxes have ended with their connections."""
        with suppress(SandboxUnavailable):
            return int((await _ask(do="reap", node=_node(host)))["reaped"])
        return 0


class SocketSandbox(Sandbox):
    """A sandbox of the server, which lives as long as the connection that started it."""

    def __init__(
        self, spec: SandboxSpec, host: Host, lifeline: Connection, started: Mapping[str, str]
    ) -> None:
        self.spec = spec
        self.host = host
        self._lifeline = lifeline
        self.workspace, self.home, self.tmp = (
            PurePosixPath(started[name]) for name in ("workspace", "home", "tmp")
        )
        self.gateway_url = started["gateway_url"]
        self._stopping: asyncio.Task[None] | None = None
        self._gateway = asyncio.create_task(self._carry_to_gateway()) if spec.gateway_port else None

    def tool_path(self, tool: ToolDirectory) -> PurePosixPath:
        return tool.target

    async def exec(self, command: Command, *, timeout: float, log_name: str) -> ExecResult:
        outputs = self.host.outputs(self.spec.name, log_name)
        async with self._request(
            do="exec",
            argv=command.argv,
            env=dict(command.env),
            cwd=str(command.cwd) if command.cwd else None,
            timeout=timeout,
            log_name=log_name,
        ) as connection:
            with ExitStack() as stack:
                stdout, stderr = (stack.enter_context(output.log.open("wb", 0)) for output in outputs)
                await connection.send_body(chunks_of(command.stdin))
                while (frame := await connection.receive())[0] != MESSAGE:
                    kind, data = frame
                    await asyncio.to_thread((stdout if kind == STDOUT else stderr).write, data)
            ended = parse_message(frame[1])
        return ExecResult(
            ended["exit_code"],
            ended["timed_out"],
            *outputs,
            limits_hit=frozenset(map(Limit, ended["limits_hit"])),
            killed_from_outside=ended["killed_from_outside"],
        )

    async def upload(self, path: PurePosixPath, data: bytes, *, executable: bool = False) -> None:
        async with self._request(do="upload", path=str(path), executable=executable) as connection:
            await connection.send_body(chunks_of(data))
            await connection.receive_message()

    async def download(self, path: PurePosixPath, *, max_bytes: int = 64 * MIB) -> bytes:
        async with self._request(do="download", path=str(path), max_bytes=max_bytes) as connection:
            parts = []
            while (frame := await connection.receive())[0] == DATA:
                parts.append(frame[1])
            parse_message(frame[1])
            return b"".join(parts)

    async def kill(self) -> None:
        async with self._request(do="kill") as connection:
            await connection.receive_message()

    async def snapshot(self, name: str) -> None:
        async with self._request(do="snapshot", snapshot=name) as connection:
            await connection.receive_message()

    async def stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        stopping = self._stopping
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait({stopping})
            raise

    async def _stop(self) -> None:
        if self._gateway is not None:
            self._gateway.cancel()
            await asyncio.gather(self._gateway, return_exceptions=True)
        self._lifeline.close_sending()
        try:
            await _hear(self._lifeline)
        finally:
            self._lifeline.close()

    @asynccontextmanager
    async def _request(self, **request: Any) -> AsyncIterator[Connection]:
        """Open a connection with a request about this sandbox; leaving early cancels the request."""
        connection = await _connect()
        try:
            await connection.send_message(node=_node(self.host), name=self.spec.name, **request)
            yield connection
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SandboxUnavailable("the sandbox server closed the connection", hint=_hint()) from None
        except asyncio.CancelledError:
            connection.close_sending()
            await asyncio.shield(connection.wait_closed())
            raise
        finally:
            connection.close()

    async def _carry_to_gateway(self) -> None:
        """Wait at the server for the agent's connections, one ahead, and forward each to the gateway."""
        async with asyncio.TaskGroup() as carried:
            while True:
                waiting = await _connect()
                try:
                    await waiting.send_message(do="gateway", node=_node(self.host), name=self.spec.name)
                    await waiting.receive_message()
                except (asyncio.IncompleteReadError, ConnectionError):
                    return  # The sandbox is gone.
                except BaseException:
                    waiting.close()
                    raise
                carried.create_task(self._carry(waiting))

    async def _carry(self, agent: Connection) -> None:
        try:
            gateway = Connection(
                *await asyncio.open_connection(self.spec.gateway_host, self.spec.gateway_port)
            )
        except OSError:
            agent.close()
            return
        try:
            await join(agent, gateway)
        finally:
            gateway.close()
            agent.close()


def _hint() -> str:
    return f"start `polar-sandbox-server`, and set {SOCKET_VARIABLE} to its socket"


async def _connect() -> Connection:
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise SandboxUnavailable(f"{SOCKET_VARIABLE} is not set", hint=_hint())
    try:
        return Connection(*await asyncio.open_unix_connection(path))
    except OSError as error:
        raise SandboxUnavailable(f"no sandbox server at {path}: {error.strerror}", hint=_hint()) from None


async def _hear(connection: Connection) -> dict[str, Any]:
    try:
        return await connection.receive_message()
    except (asyncio.IncompleteReadError, ConnectionError):
        raise SandboxUnavailable("the sandbox server closed the connection", hint=_hint()) from None


async def _ask(**request: Any) -> dict[str, Any]:
    connection = await _connect()
    try:
        await connection.send_message(**request)
        return await _hear(connection)
    finally:
        connection.close()


def _node(host: Host) -> str:
    """Return a name for this node on a server that several share."""
    return hashlib.sha256(f"{socket.gethostname()}:{host.directory}".encode()).hexdigest()[:12]


@cache
def _digest(directory: Path) -> str:
    """Return a digest of a tool directory, computed once, since tools never change."""
    digest = hashlib.sha256()
    for path in _walk(directory):
        about = path.lstat()
        digest.update(f"{path.relative_to(directory)}\0{stat.S_IMODE(about.st_mode):o}\0".encode())
        if path.is_symlink():
            digest.update(os.fsencode(os.readlink(path)))
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _walk(directory: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(directory):
        folders.sort()
        yield from (Path(parent, name) for name in sorted([*folders, *names]))


async def _send_tool(connection: Connection, directory: Path) -> None:
    """Send a directory as a tar archive, which a thread writes to a pipe, to save memory."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
            archive.add(directory, ".")

    packing = asyncio.create_task(asyncio.to_thread(write))
    with os.fdopen(reading, "rb", 0) as pipe:
        while data := await asyncio.to_thread(pipe.read, CHUNK):
            await connection.send(DATA, data)
    await packing
    await connection.send(DATA, b"")
