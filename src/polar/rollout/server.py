"""The rollout server: the control plane as an application, listening on a port, with HTTPS or here only."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import socket
import ssl
from collections.abc import Collection, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import uvicorn
from fastapi import APIRouter, FastAPI, Response
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from polar import __version__
from polar.config.settings import ServerSettings, TlsSettings
from polar.errors import Conflict, InvalidInput, PolarError
from polar.files import locked, write_atomic
from polar.models.access import TokenRole
from polar.models.views import Problem
from polar.rollout.access import PREFIX, READERS, Authenticator, GuardedRoute, allow
from polar.rollout.dashboard.files import dashboard_routes
from polar.rollout.dashboard.routes import dashboard_data_routes
from polar.rollout.problems import answer_problems
from polar.rollout.routes import node_routes, open_routes, token_routes, user_routes
from polar.rollout.service import RolloutService
from polar.store.store import Store
from polar.telemetry.page import CONTENT_TYPE, PATH, MetricsPage, is_known_host

GRACE_SECONDS = 5
"""How long requests in flight may take to end when the server closes."""

MAX_HEAD_BYTES = 1 << 20
"""The longest line and headers of a request: the results feed takes many task ids in its query."""


class RolloutServer:
    """`async with RolloutServer(store, token, settings) as server:` serves while the body runs."""

    def __init__(
        self,
        store: Store,
        token: str,
        settings: ServerSettings = ServerSettings(),
        *,
        webhook_secret: str | None = None,
    ) -> None:
        self._service = RolloutService(store, settings, webhook_secret)
        self._authenticator = Authenticator(token, store.tokens)
        # Where others may reach the server they use names that it cannot know.
        hosts = settings.hosts if settings.hosts or is_for_this_machine(settings) else None
        self._app = create_app(self._service, self._authenticator, hosts=hosts)
        self._settings = settings
        self._parts = AsyncExitStack()
        self._port = settings.port

    @property
    def page(self) -> MetricsPage:
        """What it shows at `/metrics`; others of its process may add to it."""
        return self._service.page

    @property
    def url(self) -> str:
        """Where this machine reaches the server; the port is the real one once it listens."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        scheme = "https" if self._settings.tls else "http"
        return f"{scheme}://[{host}]:{self._port}" if ":" in host else f"{scheme}://{host}:{self._port}"

    def issue(self, name: str, role: TokenRole) -> str:
        """A token for a part of this process, which ends with it."""
        return self._authenticator.issue(name, role)

    async def start(self) -> None:
        """Listen; PolarError if the port is taken, or should not be listened on without TLS."""
        refuse_plain_http(self._settings)
        tls = listening_options(self._settings.tls)
        async with AsyncExitStack() as parts:
            listener = parts.enter_context(_listen(self._settings.host, self._settings.port))
            self._port = listener.getsockname()[1]
            await parts.enter_async_context(self._service.housekeeping())
            server = _Server(
                uvicorn.Config(
                    self._app,
                    lifespan="off",
                    log_config=None,
                    access_log=False,
                    ws="none",  # there is nothing to upgrade to, and half a handshake would wait for ever
                    timeout_graceful_shutdown=GRACE_SECONDS,
                    h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                    **tls,
                )
            )
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="rollout server")
            parts.push_async_callback(self._stop, server, serving)
            await server.listening.wait()
            self._parts = parts.pop_all()

    async def close(self) -> None:
        """Answer what is in flight, then stop; the store stays open."""
        await self._parts.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _stop(self, server: _Server, serving: asyncio.Task[None]) -> None:
        self._service.stop_waiting()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """Says when it listens, and leaves the process's signals to their owner."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay of 40 ms off only where the protocol is named.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PolarError(
            f"the rollout server cannot listen on {host}:{port}: {error.strerror}",
            hint="is another `polar serve` running? set --port or server.port to another one, or 0 for any",
        ) from None
    return listener


@contextmanager
def announce_server(data_dir: Path, url: str, certificate: Path | None) -> Iterator[None]:
    """Name the server in server.json while the body runs; of several in a directory the first is named."""
    with ExitStack() as stack:
        try:
            taken = Conflict(f"{data_dir} has a server already")
            stack.enter_context(locked(data_dir / "server.lock", busy=taken))
        except Conflict:
            yield
            return
        address = data_dir / "server.json"
        shown = str(certificate.absolute()) if certificate else None
        write_atomic(address, json.dumps({"url": url, "pid": os.getpid(), "certificate": shown}))
        stack.callback(address.unlink, missing_ok=True)
        yield


def is_for_this_machine(settings: ServerSettings) -> bool:
    """Whether the server listens for nobody else."""
    try:
        return ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        return settings.host == "localhost"


def refuse_plain_http(settings: ServerSettings) -> None:
    """InvalidInput if tokens would travel unencrypted to other machines and nobody said that they may."""
    if settings.tls is None and not settings.insecure and not is_for_this_machine(settings):
        raise InvalidInput(
            f"the server would listen on {settings.host} without TLS: others could read tokens on the way",
            hint="give --tls-cert and --tls-key, or say --insecure behind a proxy or in your own network",
        )


def listening_options(tls: TlsSettings | None) -> dict[str, Any]:
    """What uvicorn is told; InvalidInput if the certificate cannot be used."""
    if tls is None:
        return {}
    options = {
        "ssl_certfile": str(tls.cert),
        "ssl_keyfile": str(tls.key),
        "ssl_ca_certs": str(tls.client_ca) if tls.client_ca else None,
        "ssl_cert_reqs": ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
    }
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key, lambda: "")
        if tls.client_ca:
            context.load_verify_locations(tls.client_ca)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(
            f"server.tls: the certificate {tls.cert} with the key {tls.key} cannot be used: {reason}",
            hint="both are files in PEM, the key without a password",
        ) from None
    return options


def create_app(
    service: RolloutService,
    authenticator: Authenticator,
    hosts: Collection[str] | None = None,
) -> FastAPI:
    """The REST API over a service, open to those who bring a token of the role that a route needs.

    It answers under addresses, localhost and the names `hosts`; None: under any name.
    """
    app = FastAPI(
        title="Polar",
        version=__version__,
        openapi_url=f"{PREFIX}/openapi.json",
        # The interactive pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.authenticator = authenticator
    app.include_router(open_routes(service))
    app.include_router(user_routes(service))
    app.include_router(node_routes(service))
    app.include_router(token_routes(service.store.tokens, authenticator))
    app.include_router(dashboard_data_routes(service.store, service.live, service.watches))
    app.include_router(_metrics_route(service.page))
    app.router.routes.extend(dashboard_routes())
    answer_problems(app)
    if hosts is not None:
        app.add_middleware(_KnownHosts, hosts=hosts)
    return app


def _metrics_route(page: MetricsPage) -> APIRouter:
    router = APIRouter(route_class=GuardedRoute)

    @router.get(PATH, include_in_schema=False, dependencies=[allow(READERS, open_here=True)])
    async def metrics() -> Response:
        """Everything that runs in the server's process counts."""
        return Response(await page.text(), media_type=CONTENT_TYPE)

    return router


class _KnownHosts:
    """Refuses a browser that was led here under a foreign name (DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if is_known_host(host, self._hosts):
            await self._app(scope, receive, send)
            return
        said = f"this server does not answer under the name {host!r}; its owner can add it to server.hosts"
        problem = Problem(error=said, code="misdirected")
        await JSONResponse(problem.model_dump(), 421)(scope, receive, send)
