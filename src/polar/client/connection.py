"""The connection to the control plane: its address, token and certificate, requests, answers and errors."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from polar.config.settings import (
    Settings,
    environment_ca,
    environment_client_cert,
    environment_server,
    environment_token,
    load_settings,
)
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
            raise self._refused(response.status_code, response.content)
        return response.content

    async def _events(self, path: str, after: str | None) -> AsyncGenerator[tuple[str | None, bytes], None]:
        """The ids and the data of server-sent events that follow the one with the id `after`."""
        headers = {"Last-Event-ID": after} if after else {}
        try:
            async with self._http.stream("GET", path, headers=headers) as response:
                if not response.is_success:
                    raise self._refused(response.status_code, await response.aread())
                rest = b""
                async for data in response.aiter_bytes():
                    *frames, rest = (rest + data).split(b"\n\n")
                    for frame in frames:
                        fields = dict(line.partition(b": ")[::2] for line in frame.split(b"\n"))
                        if b"data" in fields:
                            yield fields[b"id"].decode() if b"id" in fields else None, fields[b"data"]
        except httpx.TransportError as error:
            raise _unreachable(self.server, error) from error

    def _refused(self, status: int, body: bytes) -> PolarError:
        if status == 404 and urlsplit(self.server).path:
            hint = "the address of a server is http://HOST:PORT, unless a proxy serves it below a path"
            return NotFound(f"{self.server} answers 404: {_failure(status, body).message}", hint=hint)
        return _failure(status, body)


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


_END = "-----END CERTIFICATE-----"

Authority = str | Path | ssl.SSLContext | None
"""A file of certificates in PEM, a context made by `pinned`, or nothing in particular."""


def server_address(given: str | None) -> str:
    """The control plane's URL: as given, from $POLAR_SERVER, or of the server started in this directory."""
    address = given or environment_server() or _local_address(load_settings())
    if not address.startswith(("http://", "https://")):
        raise PolarError(f"server {address!r} is not an address", hint="it begins with http:// or https://")
    return address.rstrip("/")


def server_token(given: str | None) -> str:
    """The bearer token: as given, from $POLAR_TOKEN, or of the data directory here."""
    token = given or environment_token()
    if token:
        return _checked(token.strip(), "the token that was given")
    settings = load_settings()
    if settings.server.token:
        return settings.server.token
    path = settings.data_dir / "token"
    try:
        return _checked(path.read_text().strip(), str(path))
    except (OSError, UnicodeDecodeError):
        raise PolarError(
            f"no token for the server: POLAR_TOKEN is not set and {path} cannot be read",
            hint="run this where `polar serve` was started, or set POLAR_TOKEN to what its token file holds",
        ) from None


def _checked(token: str, where: str) -> str:
    if not (token.isascii() and token.isprintable()):
        # Not shown: it may hold a token among other things.
        raise InvalidInput(
            f"{where} is not a token",
            hint="a token is one line, such as the file `token` in the server's data directory holds",
        )
    return token


def trusted(ca: Authority, server: str) -> ssl.SSLContext | bool:
    """How the certificate of a server is checked, and which one this client shows."""
    if not server.startswith("https://"):
        return True
    if isinstance(ca, ssl.SSLContext):
        return ca
    if ca is None and (local := _local_certificate(server)) is not None:
        return pinned(local)
    path = Path(ca) if ca is not None else environment_ca()
    context = ssl.create_default_context()
    try:
        if path is not None:
            context.load_verify_locations(path)
        _show_own(context)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(
            f"a certificate cannot be used: {getattr(error, 'strerror', None) or error}",
            hint="POLAR_CA, POLAR_CLIENT_CERT and POLAR_CLIENT_KEY name files in PEM",
        ) from None
    return context


def pinned(cert: Path) -> ssl.SSLContext:
    """Trust exactly the server that has this certificate, whatever address it is reached at."""
    try:
        own, found, _ = cert.read_text().partition(_END)
        # Only the server's own: what it brings along to prove itself has signed others too.
        context = ssl.create_default_context(cadata=own + found)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.check_hostname = False
        _show_own(context)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise InvalidInput(f"the certificate {cert} cannot be used: {error}") from None
    return context


def _show_own(context: ssl.SSLContext) -> None:
    if (own := environment_client_cert()) is not None:
        context.load_cert_chain(*own)


def _local_address(settings: Settings) -> str:
    path = settings.data_dir / "server.json"
    try:
        return str(json.loads(path.read_text())["url"])
    except FileNotFoundError:
        return f"http://{settings.server.host}:{settings.server.port}"
    except (OSError, ValueError, KeyError, TypeError):
        raise PolarError(f"{path} cannot be understood", hint="delete it, or set POLAR_SERVER") from None


def _local_certificate(server: str) -> Path | None:
    """The certificate of the server that was started in this directory, if that is the one asked for."""
    try:
        local: Any = json.loads((load_settings().data_dir / "server.json").read_text())
    except (OSError, ValueError):
        return None
    is_local = isinstance(local, dict) and local.get("url") == server and local.get("certificate")
    return Path(local["certificate"]) if is_local else None
