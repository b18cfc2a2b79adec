"""The network of closed sandboxes: the gateway, and a proxy to what a task's allow list names.

The proxy enforces address and port: names are resolved here, once, and the connection goes to the very
address that was checked. What passes through a tunnel is up to the sandbox.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from polar.runtimes.allow_list import LOCALHOST, AllowList, Destination
from polar.runtimes.base import SandboxSpec

log = logging.getLogger(__name__)

_CHUNK = 65536
MAX_CONNECTIONS = 256
"""Maximum connections per listener, so that a sandbox cannot use up the node's descriptors."""


def reachable_host(host: str) -> str:
    """Return the address of a server that listens on `host`, for clients on the same machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def serve_listener(
    listener: socket.socket, handle: Handler, *, limit: int = _CHUNK
) -> AsyncIterator[None]:
    """Handle connections to `listener` during the block, closing those beyond the limit at once."""
    connections: set[asyncio.Task[None]] = set()

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(handle(reader, writer))
        connections.add(task)
        task.add_done_callback(connections.discard)

    # Started inside the try block: a cancelled start would leave the loop with a closed descriptor.
    server = await asyncio.start_server(on_connect, sock=listener, limit=limit, start_serving=False)
    try:
        await server.start_serving()
        yield
    finally:
        server.close()
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections)


@asynccontextmanager
async def forward(listener: socket.socket, host: str, port: int) -> AsyncIterator[None]:
    """Forward connections to `listener` to `host:port` during the block."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(reachable_host(host), port)
            try:
                await join(reader, writer, far_reader, far_writer)
            finally:
                far_writer.close()
        except OSError as error:
            log.warning("a sandbox's connection to the gateway at %s:%s failed: %s", host, port, error)
        finally:
            writer.close()

    async with serve_listener(listener, carry):
        yield


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    async with asyncio.TaskGroup() as both:
        both.create_task(copy(reader, far_writer))
        both.create_task(copy(far_reader, writer))


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of the stream and pass the end on; a broken connection counts as an end."""
    try:
        while data := await reader.read(_CHUNK):
            await send(writer, data)
        if writer.can_write_eof() and not writer.is_closing():
            writer.write_eof()
    except OSError:
        writer.close()


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write and wait for the other side; raise OSError if the connection is closed."""
    # After a local close, asyncio drops what is written and uvloop raises RuntimeError.
    if writer.is_closing():
        raise ConnectionResetError("the connection was closed")
    writer.write(data)
    await writer.drain()


MAX_HEAD_BYTES = 65_536
HEAD_SECONDS = 30.0
CONNECT_SECONDS = 30.0
MAX_NAMES_COUNTED = 100

_HOP_HEADERS = {b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"host", b"te"}
"""Headers that concern only client and proxy, or that the proxy sets itself."""
_REASONS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}


def proxy_environment(allowed: AllowList, port: int) -> dict[str, str]:
    """Return the variables by which programs find the proxy; the gateway is reached without it."""
    direct = {"127.0.0.1", LOCALHOST, "::1"} - {wanted.host for wanted in allowed.destinations}
    url = f"http://127.0.0.1:{port}"
    values = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": ",".join(sorted(direct | {"127.0.0.1"}))}
    return values | {name.lower(): value for name, value in values.items()}


class ProxyRefusal(Exception):
    """A status and a text that a client gets instead of a connection."""


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    wanted: Destination
    path: str | None
    """The path; None if a tunnel is requested."""
    headers: tuple[bytes, ...]

    @classmethod
    def parse(cls, head: bytes) -> Request:
        line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        match = re.fullmatch(rb"([A-Z]{1,20}) ([\x21-\x7e]{1,60000}) HTTP/1\.[01]", line)
        if not match:
            raise ProxyRefusal(400, "not an HTTP/1 request")
        method, target = match[1].decode(), match[2].decode()
        if method == "CONNECT":
            return cls(method, _destination(target, None), None, tuple(headers))
        form = re.fullmatch(r"http://([^/?#]+)([^#]*)", target, re.IGNORECASE)
        if not form:
            raise ProxyRefusal(400, "the proxy accepts CONNECT host:port and http:// URLs")
        path = form[2] if form[2].startswith("/") else f"/{form[2]}"
        return cls(method, _destination(form[1], 80), path, tuple(headers))

    def server_head(self) -> bytes:
        """Return the head for the server: for a single request, to the host that was checked."""
        host = str(self.wanted).removesuffix(":80")
        lines = [f"{self.method} {self.path} HTTP/1.1".encode(), f"Host: {host}".encode()]
        # A continuation line could otherwise hide the header it continues.
        kept = [line for line in self.headers if line[:1] not in b" \t" and _name(line) not in _HOP_HEADERS]
        return b"\r\n".join([*lines, *kept, b"Connection: close", b"", b""])

    @property
    def body_bytes(self) -> int | None:
        """The length of the body; None if it extends to the end of the connection."""
        values = {_name(line): line.partition(b":")[2].strip() for line in self.headers}
        if b"transfer-encoding" in values:
            return None
        length = values.get(b"content-length", b"0")
        if not re.fullmatch(rb"[0-9]{1,15}", length):
            raise ProxyRefusal(400, "Content-Length is not a number")
        return int(length)


class ForwardProxy:
    def __init__(self, allowed: AllowList, session_id: str) -> None:
        self._allowed = allowed
        self._session_id = session_id
        self.refused: Counter[str] = Counter()

    def log_refusals(self) -> None:
        for name, count in self.refused.items():
            log.info("session %s: refused %d connections to %s", self._session_id, count, name)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(Request.parse(head), reader, writer)
        except ProxyRefusal as refusal:
            await _send_refusal(writer, refusal)
        except asyncio.LimitOverrunError:
            await _send_refusal(writer, ProxyRefusal(400, f"the request head exceeds {MAX_HEAD_BYTES} bytes"))
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return  # The client is gone, or sent no request.
        finally:
            writer.close()

    async def _answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        body_bytes = request.body_bytes if request.path is not None else None
        far_reader, far_writer = await self._connect(request.wanted)
        try:
            if request.path is None:
                await send(writer, b"HTTP/1.1 200 Connection established\r\n\r\n")
                await join(reader, writer, far_reader, far_writer)
                return
            await send(far_writer, request.server_head())
            sending = asyncio.create_task(_send_body(reader, far_writer, body_bytes))
            try:
                await copy(far_reader, writer)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
        finally:
            far_writer.close()

    async def _connect(self, wanted: Destination) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allowed.names(wanted):
            raise self._refusal(wanted, "is not in runtime.options.network.allow of this task")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return await self._connect_checked(wanted)
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer"
            raise ProxyRefusal(502, f"{wanted} cannot be reached: {reason}") from None

    async def _connect_checked(
        self, wanted: Destination
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to one of the permitted addresses that the name resolves to now."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(wanted.host, wanted.port, type=socket.SOCK_STREAM)
        addresses = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
        admitted = [text for text in addresses if self._allowed.admits(wanted, ip_address(text))]
        if not admitted:
            raise self._refusal(wanted, f"resolves to a private address: {', '.join(addresses)}")
        for text in admitted[:-1]:
            try:
                return await asyncio.open_connection(text, wanted.port)
            except OSError:
                continue  # The next address may answer.
        return await asyncio.open_connection(admitted[-1], wanted.port)

    def _refusal(self, wanted: Destination, why: str) -> ProxyRefusal:
        name = str(wanted)
        if name not in self.refused:
            if len(self.refused) >= MAX_NAMES_COUNTED:
                name = "others"
            else:
                log.warning("session %s: refused a connection: %s %s", self._session_id, wanted, why)
        self.refused[name] += 1
        return ProxyRefusal(403, f"{wanted} {why}")


async def _send_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: int | None) -> None:
    if count is None:
        return await copy(reader, writer)
    try:
        while count and (data := await reader.read(min(count, MAX_HEAD_BYTES))):
            count -= len(data)
            await send(writer, data)
    except OSError:
        writer.close()


async def _send_refusal(writer: asyncio.StreamWriter, refusal: ProxyRefusal) -> None:
    status, text = refusal.args
    body = f"polar: {text}\n".encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    with suppress(OSError):
        await send(writer, head.encode() + body)


def _destination(authority: str, default_port: int | None) -> Destination:
    has_port = re.search(r":[0-9]*$", authority) and not authority.endswith("]")
    text = authority if has_port or default_port is None else f"{authority}:{default_port}"
    try:
        wanted = Destination.parse(text)
    except ValueError:
        raise ProxyRefusal(403, f"{text[:300]!r} is not a server name") from None
    if wanted.host.startswith("*."):
        raise ProxyRefusal(403, f"{text[:300]!r} is not a server name")
    return wanted


def _name(line: bytes) -> bytes:
    return line.partition(b":")[0].strip().lower()


GATEWAY_PORT = 47100
"""The gateway's port on the loopback of every sandbox; high, to avoid conflicts."""
PROXY_PORT = 47101
"""The proxy's port, in sandboxes with an allow list."""


class Network(BaseModel):
    """What a task may reach besides the gateway."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: tuple[Annotated[str, AfterValidator(lambda text: str(Destination.parse(text)))], ...] = Field(
        default=(), max_length=256
    )
    """Servers as `host:port`; `*.domain:port` covers all hosts below a domain."""

    @property
    def allowed(self) -> AllowList:
        return AllowList.parse(self.allow)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports on the sandbox's loopback where the node listens."""
        return (GATEWAY_PORT, PROXY_PORT) if self.allow else (GATEWAY_PORT,)

    @property
    def env(self) -> dict[str, str]:
        return proxy_environment(self.allowed, PROXY_PORT) if self.allow else {}

    @asynccontextmanager
    async def serve(self, listeners: Sequence[socket.socket], spec: SandboxSpec) -> AsyncIterator[None]:
        """Serve the listeners, given in the order of `ports`, during the block."""
        async with AsyncExitStack() as stack:
            for listener in listeners:
                stack.callback(listener.close)
            for gateway in listeners[:1]:
                await stack.enter_async_context(forward(gateway, spec.gateway_host, spec.gateway_port))
            for listener in listeners[1:]:
                proxy = ForwardProxy(self.allowed, spec.name)
                stack.callback(proxy.log_refusals)
                await stack.enter_async_context(serve_listener(listener, proxy.serve, limit=MAX_HEAD_BYTES))
            yield
