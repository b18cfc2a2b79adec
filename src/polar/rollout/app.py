"""The control plane as an ASGI application."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import APIRouter, FastAPI, Response
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from polar import __version__
from polar.models.views import Problem
from polar.rollout.access import PREFIX, READERS, GuardedRoute, allow
from polar.rollout.dashboard.files import dashboard_routes
from polar.rollout.dashboard.routes import dashboard_data_routes
from polar.rollout.problems import answer_problems
from polar.rollout.routes import node_routes, open_routes, token_routes, user_routes
from polar.rollout.service import RolloutService
from polar.rollout.tokens import Authenticator
from polar.telemetry.page import CONTENT_TYPE, PATH, MetricsPage, is_known_host


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
