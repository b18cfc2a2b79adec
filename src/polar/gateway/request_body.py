"""Reads the body of a client's request: in bounded time, into bounded memory, out of known encodings."""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web

from polar.config.settings import GatewaySettings
from polar.dialects.base import Refusal, RequestRefused
from polar.gateway.quota import HeldRequest, memory_of

_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
"""As zlib calls a stream whose own head says which of the two it is."""
_STEP = 1 << 20
"""How much is decompressed at once."""
_SHORT = 1 << 16
"""Bytes that are looked through sooner than another thread would begin with them."""


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
