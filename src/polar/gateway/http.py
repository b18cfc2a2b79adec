"""HTTP with a client of the gateway: bounded requests, and answers that stay alive while they wait."""

from __future__ import annotations

import asyncio
import logging
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from polar.config.settings import GatewaySettings
from polar.dialects.base import Refusal, RequestRefused, StreamEncoder
from polar.dialects.openai_chat import error_object
from polar.gateway.quota import HeldRequest, memory_of

log = logging.getLogger(__name__)

_LINGERING_SECONDS = 2.0
"""How long the rest of a body that nobody wants is taken in, so that its client reads why."""
_REPEATABLE = re.compile(rb"\r\n(user-agent|content-type):[^\r\n]*(?=\r\n)", re.IGNORECASE)
"""Headers that some clients send twice and that aiohttp then refuses. Neither says where a message ends, so
the first of each may stand for all."""
_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
"""As zlib calls a stream whose own head says which of the two it is."""
_STEP = 1 << 20
"""How much is decompressed at once."""
_SHORT = 1 << 16
"""Bytes that are looked through sooner than another thread would begin with them."""


class ClientConnection(web.RequestHandler):
    """Speaks HTTP with one client, as aiohttp does but for what the module says."""

    __slots__ = ("_is_between_requests",)

    def __init__(self, server: web.Server, settings: GatewaySettings) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as AppRunner is told to have none
            keepalive_timeout=settings.head_seconds,
            lingering_time=_LINGERING_SECONDS,
            auto_decompress=False,  # read_body does that, within bounds
        )
        self._is_between_requests = True

    def data_received(self, data: bytes) -> None:
        if self._is_between_requests:
            self._is_between_requests = False
            data = without_repeated_headers(data)
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        finished = await super().finish_response(request, resp, start_time)
        self._is_between_requests = request.content.is_eof()
        return finished

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What cannot be parsed is told in OpenAI's shape: whose address was meant is not known."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        log.info("a request could not be parsed: %s", type(exc).__name__)
        response = web.Response(status=status, body=_parse_error(exc), content_type="application/json")
        response.force_close()
        return response


def without_repeated_headers(data: bytes) -> bytes:
    """What a client sent, with the first of each repeatable header, if a whole head is in it."""
    end = data.find(b"\r\n\r\n")
    seen: set[bytes] = set()

    def once(header: re.Match[bytes]) -> bytes:
        name = header[1].lower()
        is_repeated = name in seen
        seen.add(name)
        return b"" if is_repeated else header[0]

    return _REPEATABLE.sub(once, data[: end + 2]) + data[end + 2 :] if end >= 0 else data


def _parse_error(error: HttpProcessingError) -> bytes:
    message = f"The request is not valid HTTP: {error.message.splitlines()[0]}"
    return orjson.dumps({"error": error_object(message)})


async def read_body(request: web.Request, settings: GatewaySettings, held: HeldRequest) -> bytes:
    """The whole body as the client meant it; RequestRefused says what is wrong with it."""
    encoding = _encoding(request)
    try:
        async with asyncio.timeout(settings.body_seconds):
            body = await _received(request, settings.max_body_bytes, held)
    except TimeoutError:
        raise _malformed(
            f"The request body did not arrive within {settings.body_seconds:g} seconds."
        ) from None
    except web.RequestPayloadError:
        raise _malformed("The request body is not framed as its headers say.") from None
    if encoding:
        body = await _inflated(body, settings.max_body_bytes, held)
    held.hold(memory_of(body) if len(body) <= _SHORT else await asyncio.to_thread(memory_of, body))
    return body


def _encoding(request: web.Request) -> str:
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise _malformed("The Content-Encoding must be gzip, deflate or identity.")
    return encoding


async def _received(request: web.Request, limit: int, held: HeldRequest) -> bytes:
    held.hold(_within(request.content_length or 0, limit))
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        held.hold(max(_within(len(body), limit), request.content_length or 0))
    return bytes(body)


def _within(length: int, limit: int) -> int:
    if length > limit:
        raise RequestRefused(Refusal.TOO_LARGE, f"The request body is larger than {limit} bytes.")
    return length


async def _inflated(body: bytes, limit: int, held: HeldRequest) -> bytes:
    """Decompressed step by step, so that no more is ever in memory than is held."""
    inflating = zlib.decompressobj(_ZLIB_OR_GZIP)
    inflated, rest = bytearray(), body
    while rest and not inflating.eof:
        try:
            inflated += await asyncio.to_thread(inflating.decompress, rest, _STEP)
        except zlib.error:
            raise _malformed("The request body is not encoded as its Content-Encoding says.") from None
        held.hold(len(body) + _within(len(inflated), limit))
        rest = inflating.unconsumed_tail
    if not inflating.eof or inflating.unused_data:
        raise _malformed("The encoded request body is cut off, or something follows it.")
    return bytes(inflated)


def _malformed(message: str) -> RequestRefused:
    return RequestRefused(Refusal.MALFORMED, message)


async def go_on(request: web.Request) -> None:
    """Ask a client that waits for it to send its body; no other expectation is known, or does harm."""
    with suppress(ConnectionError):  # it is gone, as its handler will notice
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # else aiohttp takes the answer itself for sent


@asynccontextmanager
async def kept_alive(
    response: web.StreamResponse, encoder: StreamEncoder, seconds: float
) -> AsyncIterator[None]:
    """Sends the dialect's keep-alive all the while the block is at work."""

    async def tick() -> None:
        # A client that is gone cancels the handler itself; the ticker has nothing to add.
        with suppress(ConnectionError):
            while True:
                await asyncio.sleep(seconds)
                await response.write(encoder.keep_alive())

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)


def json_answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
