"""The server: creates bubblewrap sandboxes for the nodes that connect to its socket.

It needs only that socket from a node: neither its files nor its network.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from polar.runtimes.base import (
    Command,
    ExecResult,
    Host,
    Output,
    Sandbox,
    SandboxError,
    SandboxSpec,
    ToolDirectory,
)
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.runtimes.supervisor import enter_closed_network
from polar_socket_runtime.wire import CHUNK, STDERR, STDOUT, Connection, chunks_of, join

LOOK_SECONDS = 0.05
"""Seconds between checks of a running command's output."""


Handler = Callable[["Server", Connection, dict[str, Any]], Coroutine[Any, Any, None]]


@dataclass
class Running:
    """A sandbox, and the node's connections that wait for its agent to contact the gateway."""

    sandbox: Sandbox
    to_gateway: asyncio.Queue[Connection] = field(default_factory=asyncio.Queue)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    def __init__(self, directory: Path) -> None:
        self.host = Host(directory)
        self._tools = directory / "tools"
        self._running: dict[str, Running] = {}
        self._unpacking = asyncio.Lock()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one request of a node."""
        connection = Connection(reader, writer)
        try:
            request = await connection.receive_message()
            handle = self._handlers[request["do"]]
            try:
                await handle(self, connection, request)
            except SandboxError as error:
                await connection.fail(error)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The node is gone.
        finally:
            connection.close()

    async def _check(self, connection: Connection, request: dict[str, Any]) -> None:
        await connection.send_message(
            unavailable=await BubblewrapRuntime.unavailable(),
            enforcement=dict(await BubblewrapRuntime.enforcement()),
        )

    async def _start(self, connection: Connection, request: dict[str, Any]) -> None:
        name = _name(request)
        await self._fetch_tools(connection, request["tools"])
        # From here on the node sends nothing; closing the connection ends the sandbox.
        ended = asyncio.create_task(connection.wait_closed())
        async with AsyncExitStack() as stack:
            starting = asyncio.create_task(self._begin(name, request, stack))
            await asyncio.wait({starting, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
            if starting.cancelled():
                return
            sandbox = starting.result()
            await connection.send_message(
                workspace=str(sandbox.workspace),
                home=str(sandbox.home),
                tmp=str(sandbox.tmp),
                gateway_url=sandbox.gateway_url,
            )
            await ended
        await connection.send_message(stopped=True)

    async def _begin(self, name: str, request: dict[str, Any], stack: AsyncExitStack) -> Sandbox:
        gateway_port = 0
        if request["has_gateway"]:
            server = await asyncio.start_server(
                lambda reader, writer: self._to_gateway(name, Connection(reader, writer)), "127.0.0.1", 0
            )
            stack.callback(server.close)
            gateway_port = server.sockets[0].getsockname()[1]
        tools = tuple(
            ToolDirectory(self._tools / digest, PurePosixPath(target)) for digest, target in request["tools"]
        )
        base = _name({**request, "name": request["base"]}) if request["base"] else None
        runtime = BubblewrapRuntime(BubblewrapRuntime.Options.model_validate(request["options"]))
        sandbox = await runtime.start(SandboxSpec(name, "127.0.0.1", gateway_port, tools, base), self.host)
        self._running[name] = Running(sandbox)
        stack.push_async_callback(self._stop, name)
        return sandbox

    async def _stop(self, name: str) -> None:
        running = self._running[name]
        try:
            await running.sandbox.stop()
            await asyncio.to_thread(shutil.rmtree, self.host.logs / name, ignore_errors=True)
        finally:
            del self._running[name]
            running.stopped.set()
            while not running.to_gateway.empty():
                running.to_gateway.get_nowait().close()

    async def _fetch_tools(self, connection: Connection, tools: list[list[str]]) -> None:
        """Receive the tool directories that no node has sent before."""
        async with self._unpacking:
            missing = [digest for digest in {digest for digest, _ in tools} if not self._has(digest)]
            await connection.send_message(missing=missing)
            for digest in missing:
                await self._unpack(connection, self._tools / digest)

    def _has(self, digest: str) -> bool:
        if not digest.isalnum():
            raise SandboxError(f"{digest!r} is not a digest")
        return (self._tools / digest).is_dir()

    async def _unpack(self, connection: Connection, target: Path) -> None:
        self._tools.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._tools, prefix=".") as scratch:
            archive, unpacked = Path(scratch, "archive"), Path(scratch, "unpacked")
            with archive.open("wb") as file:
                async for data in connection.body():
                    await asyncio.to_thread(file.write, data)
            await asyncio.to_thread(_extract, archive, unpacked)
            unpacked.rename(target)

    async def _exec(self, connection: Connection, request: dict[str, Any]) -> None:
        sandbox, name = self._sandbox(request), _name(request)
        stdin = b"".join([data async for data in connection.body()])
        command = Command(
            tuple(request["argv"]),
            request["env"],
            PurePosixPath(request["cwd"]) if request["cwd"] else None,
            stdin,
        )
        outputs = self.host.outputs(name, request["log_name"])
        for output in outputs:
            output.remove()
        ended = asyncio.create_task(connection.wait_closed())
        running = asyncio.create_task(
            sandbox.exec(command, timeout=request["timeout"], log_name=request["log_name"])
        )
        try:
            result = await _follow(connection, running, ended, outputs)
        finally:
            for task in (running, ended):
                task.cancel()
            await asyncio.wait({running, ended})
        if result is not None:
            await connection.send_message(
                exit_code=result.exit_code,
                timed_out=result.timed_out,
                limits_hit=sorted(result.limits_hit),
                killed_from_outside=result.killed_from_outside,
            )

    async def _upload(self, connection: Connection, request: dict[str, Any]) -> None:
        data = b"".join([part async for part in connection.body()])
        await self._sandbox(request).upload(
            PurePosixPath(request["path"]), data, executable=request["executable"]
        )
        await connection.send_message()

    async def _download(self, connection: Connection, request: dict[str, Any]) -> None:
        path = PurePosixPath(request["path"])
        data = await self._sandbox(request).download(path, max_bytes=request["max_bytes"])
        for chunk in chunks_of(data):
            await connection.send(b"D", chunk)
        await connection.send_message()

    async def _kill(self, connection: Connection, request: dict[str, Any]) -> None:
        await self._sandbox(request).kill()
        await connection.send_message()

    async def _snapshot(self, connection: Connection, request: dict[str, Any]) -> None:
        await self._sandbox(request).snapshot(_name({**request, "name": request["snapshot"]}))
        await connection.send_message()

    async def _discard(self, connection: Connection, request: dict[str, Any]) -> None:
        name = _name({**request, "name": request["snapshot"]})
        await BubblewrapRuntime(BubblewrapRuntime.Options()).discard(name, self.host)
        await connection.send_message()

    async def _reap(self, connection: Connection, request: dict[str, Any]) -> None:
        """Remove what an earlier process of this node left: stop its sandboxes, delete its snapshots."""
        for name, running in list(self._running.items()):
            if name.startswith(f"{request['node']}-"):
                await running.stopped.wait()
        runtime = BubblewrapRuntime(BubblewrapRuntime.Options())
        for path in self.host.snapshots.glob(f"{request['node']}-*"):
            await runtime.discard(path.name, self.host)
        await connection.send_message(reaped=0)

    async def _gateway(self, connection: Connection, request: dict[str, Any]) -> None:
        """Keep the node's connection until the agent contacts the gateway."""
        running = self._running.get(_name(request))
        if running is None:
            raise SandboxError("no such sandbox")
        running.to_gateway.put_nowait(connection)
        await connection.writer.wait_closed()

    async def _to_gateway(self, name: str, agent: Connection) -> None:
        """Join an agent's connection with one that its node keeps waiting."""
        node = None
        try:
            running = self._running.get(name)
            if running is None:
                return
            node = await running.to_gateway.get()
            await node.send_message(connected=True)
            await join(agent, node)
        except ConnectionError:
            return
        finally:
            agent.close()
            if node is not None:
                node.close()

    def _sandbox(self, request: dict[str, Any]) -> Sandbox:
        running = self._running.get(_name(request))
        if running is None:
            raise SandboxError(f"sandbox {request['name']!r} has ended")
        return running.sandbox

    _handlers: ClassVar[dict[str, Handler]] = {
        "check": _check,
        "start": _start,
        "exec": _exec,
        "upload": _upload,
        "download": _download,
        "kill": _kill,
        "snapshot": _snapshot,
        "discard": _discard,
        "reap": _reap,
        "gateway": _gateway,
    }


def _name(request: dict[str, Any]) -> str:
    """Return the name of a node's sandbox or snapshot on this server."""
    name = f"{request['node']}-{request['name']}"
    if "/" in name or "\0" in name:
        raise SandboxError(f"{name!r} is not a valid name")
    return name


async def _follow(
    connection: Connection,
    running: asyncio.Task[ExecResult],
    ended: asyncio.Task[None],
    outputs: tuple[Output, Output],
) -> ExecResult | None:
    """Send a command's output while it runs; return its result, or None if the node is gone."""
    sent = [0, 0]

    async def send_new() -> None:
        for number, (kind, output) in enumerate(zip((STDOUT, STDERR), outputs, strict=True)):
            while data := await asyncio.to_thread(_part, output.log, sent[number]):
                sent[number] += len(data)
                await connection.send(kind, data)

    while not running.done() and not ended.done():
        await asyncio.wait({running, ended}, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            await send_new()
    if not running.done():
        return None
    await send_new()
    return running.result()


def _part(log: Path, start: int) -> bytes:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return file.read(CHUNK)
    except FileNotFoundError:
        return b""


def _extract(archive: Path, target: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(target, filter="tar")


async def _serve(path: Path, directory: Path) -> None:
    await BubblewrapRuntime.reap(Host(directory))
    server = Server(directory)
    path.unlink(missing_ok=True)
    mask = os.umask(0o077)  # Anyone who can connect can run programs here.
    listening = await asyncio.start_unix_server(server.serve, path)
    os.umask(mask)
    print(f"serving sandboxes at {path}", flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    listening.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="socket for nodes, for its owner only")
    parser.add_argument("--directory", type=Path, required=True, help="directory of the sandboxes")
    parser.add_argument(
        "--own-network", action="store_true", help="leave the host's network: the socket is the only way out"
    )
    arguments = parser.parse_args()
    if arguments.own_network:
        enter_closed_network()
    directory = arguments.directory.absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    asyncio.run(_serve(arguments.socket.absolute(), directory))


if __name__ == "__main__":
    main()
