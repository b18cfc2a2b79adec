"""Requests to the control plane: their answers as models, their failures as errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from polar.client.address import Authority, server_address, server_token, trusted
from polar.errors import Conflict, Forbidden, InvalidInput, NotFound, PolarError, Unavailable, explain
from polar.models.views import Problem

M = TypeVar("M", bound=BaseModel)

PAGE = 200
"""How many things a page holds when the client reads them all."""

_FROM_A_PROXY = (502, 503, 504)
"""What a proxy answers in its own words while the server behind it is away."""

_ERRORS: dict[str, type[PolarError]] = {
    "invalid_input": InvalidInput,
    "too_large": InvalidInput,
    "misdirected": InvalidInput,
    "not_found": NotFound,
    "conflict": Conflict,
    "unavailable": Unavailable,
}


class Connection:
    """One server, and the token that opens it."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        timeout: float = 30.0,
        ca: Authority = None,
    ) -> None:
        """Without arguments: as $POLAR_SERVER, $POLAR_TOKEN and $POLAR_CA say, else the server started here.

        `ca`: whose certificates to trust besides the machine's own, a file in PEM.
        """
        self.server = server_address(server)
        self._timeout = timeout
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {server_token(token)}"},
            verify=trusted(ca, self.server),
            base_url=f"{self.server}/api/v1",
            timeout=timeout,
            # Proxies and .netrc of the environment are not meant for the control plane, often on loopback.
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _get(
        self, path: str, answer: type[M], query: Mapping[str, Any] | None = None, *, waits: float = 0.0
    ) -> M:
        return _read(answer, await self._send("GET", path, query=query, waits=waits))

    async def _post(
        self,
        path: str,
        body: BaseModel | bytes | AsyncIterable[bytes] | None,
        answer: type[M],
        *,
        waits: float = 0.0,
    ) -> M:
        return _read(answer, await self._send("POST", path, body, waits=waits))

    async def _pages(self, path: str, page: type[M], query: Mapping[str, Any]) -> AsyncIterator[M]:
        """All pages of a list, each asked for with the `next` of the one before."""
        position: str | None = None
        while True:
            found: Any = await self._get(path, page, {**query, "limit": PAGE, "after": position})
            yield found
            if (position := found.next) is None:
                return

    async def _send(
        self,
        method: str,
        path: str,
        body: BaseModel | bytes | AsyncIterable[bytes] | None = None,
        *,
        query: Mapping[str, Any] | None = None,
        waits: float = 0.0,
    ) -> bytes:
        """Send a body, which is JSON unless it is streamed, and return the answer's.

        The server may hold its answer back for `waits` seconds beyond the time-out.
        """
        kind = "application/json" if isinstance(body, BaseModel | bytes) else "application/octet-stream"
        try:
            response = await self._http.request(
                method,
                path,
                params={name: value for name, value in (query or {}).items() if value is not None},
                headers={"Content-Type": kind},
                content=body.model_dump_json().encode() if isinstance(body, BaseModel) else body,
                timeout=httpx.Timeout(self._timeout, read=self._timeout + waits),
            )
        except httpx.TransportError as error:
            raise _unreachable(self.server, error) from error
        # It has been read. Its stream refers to it, so both and the request would wait for the garbage
        # collector.
        response.stream = httpx.ByteStream(b"")
        if not response.is_success:
            raise _failure(response.status_code, response.content)
        return response.content

    async def _events(self, path: str, after: str | None) -> AsyncGenerator[tuple[str | None, bytes], None]:
        """The ids and the data of server-sent events that follow the one with the id `after`."""
        headers = {"Last-Event-ID": after} if after else {}
        try:
            async with self._http.stream("GET", path, headers=headers) as response:
                if not response.is_success:
                    raise _failure(response.status_code, await response.aread())
                rest = b""
                async for data in response.aiter_bytes():
                    *frames, rest = (rest + data).split(b"\n\n")
                    for frame in frames:
                        fields = dict(line.partition(b": ")[::2] for line in frame.split(b"\n"))
                        if b"data" in fields:
                            yield fields[b"id"].decode() if b"id" in fields else None, fields[b"data"]
        except httpx.TransportError as error:
            raise _unreachable(self.server, error) from error


def segment(id: str) -> str:
    """An id as one segment of a path, whatever a user typed."""
    if not id or id in (".", ".."):
        raise InvalidInput(f"{id!r} is not an id")
    return quote(id, safe="")


def error_of(problem: Problem) -> PolarError:
    """The error that the server's answer, or a part of it, stands for."""
    match problem.code:
        case "unauthorized":
            return PolarError(
                "the server refused the token",
                hint="set POLAR_TOKEN to one that `polar token create` made, or to the content of the file"
                " `token` in the server's data directory",
            )
        case "forbidden":
            return Forbidden(problem.error, hint="`polar token create` makes tokens of any role, for admins")
        case code:
            return _ERRORS.get(code, PolarError)(problem.error)


def _read(answer: type[M], body: bytes) -> M:
    try:
        return answer.model_validate_json(body)
    except ValidationError as error:
        raise PolarError(
            f"the server's answer is not understood: {explain(error)}",
            hint="server and client should be the same version",
        ) from None


def _failure(status: int, body: bytes) -> PolarError:
    try:
        return error_of(Problem.model_validate_json(body))
    except ValidationError:
        if status in _FROM_A_PROXY:
            return Unavailable(f"the server cannot be reached: what stands before it answered {status}")
        return PolarError(f"the server answered {status}, and not as Polar does", hint="check its address")


def _unreachable(server: str, error: httpx.TransportError) -> Unavailable:
    if isinstance(error, httpx.TimeoutException):
        return Unavailable(f"the server at {server} did not answer in time")
    reason = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        return Unavailable(
            f"the server at {server} shows a certificate that is not trusted: {reason}",
            hint="set POLAR_CA to the file of the authority that signed it",
        )
    return Unavailable(
        f"the server at {server} cannot be reached: {reason}", hint="is `polar serve` running?"
    )
