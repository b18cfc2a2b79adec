"""A client's connection: takes headers that clients repeat, and says in JSON what cannot be parsed."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from polar.config.settings import GatewaySettings

log = logging.getLogger(__name__)

_LINGERING_SECONDS = 2.0
"""How long the rest of a body that nobody wants is taken in, so that its client reads why."""
_REPEATABLE = re.compile(rb"\r\n(user-agent|content-type):[^\r\n]*(?=\r\n)", re.IGNORECASE)
"""Headers that some clients send twice and that aiohttp then refuses. Neither says where a message ends, so
the first of each may stand for all."""


class Connection(web.RequestHandler):
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
    said: dict[str, Any] = {
        "message": f"The request is not valid HTTP: {error.message.splitlines()[0]}",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }
    return orjson.dumps({"error": said})
