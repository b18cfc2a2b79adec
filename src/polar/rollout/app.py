"""The control plane as an ASGI application."""

from __future__ import annotations

from collections.abc import Collection

from fastapi import FastAPI
from fastapi.routing import APIRoute

from polar import __version__
from polar.rollout.access import PREFIX, BodyLimits
from polar.rollout.dashboard.files import dashboard_routes
from polar.rollout.dashboard_routes import dashboard_data_routes
from polar.rollout.gate import Gate
from polar.rollout.keys import Keys
from polar.rollout.metrics_route import metrics_route
from polar.rollout.problems import answer_problems
from polar.rollout.routes import admin_routes, node_routes, open_routes, user_routes
from polar.rollout.service import RolloutService


def create_app(
    service: RolloutService,
    keys: Keys,
    limits: BodyLimits = BodyLimits(),
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
        generate_unique_id_function=_operation_id,
    )
    app.include_router(open_routes(service))
    app.include_router(user_routes(service))
    app.include_router(node_routes(service))
    app.include_router(admin_routes(service, keys))
    app.include_router(dashboard_data_routes(service.store, service.live, service.runs_dir))
    app.router.routes.append(metrics_route(service.page))
    app.router.routes.extend(dashboard_routes())
    answer_problems(app)
    app.add_middleware(Gate, keys=keys, audit=service.store.audit, limits=limits, hosts=hosts)
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name
