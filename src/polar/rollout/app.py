"""The control plane as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.routing import APIRoute

from polar import __version__
from polar.rollout.gate import Gate
from polar.rollout.problems import answer_problems
from polar.rollout.routes import PREFIX, node_routes, open_routes, user_routes
from polar.rollout.service import RolloutService

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_RECORDING_BYTES = 1024 * 1024 * 1024


def create_app(
    service: RolloutService,
    token: str,
    *,
    max_body_bytes: int = MAX_BODY_BYTES,
    max_recording_bytes: int = MAX_RECORDING_BYTES,
) -> FastAPI:
    """The REST API over a service, open only to those who bring the token."""
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
    answer_problems(app)
    app.add_middleware(
        Gate, token=token, max_body_bytes=max_body_bytes, max_recording_bytes=max_recording_bytes
    )
    return app


def _operation_id(route: APIRoute) -> str:
    return route.name
