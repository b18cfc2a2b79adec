"""`GET /metrics`: the page of everything that runs in the server's process."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.telemetry.page import CONTENT_TYPE, PATH, MetricsPage


def metrics_route(page: MetricsPage) -> Route:
    """Open to this machine, to others with a token that may read; see rollout/access.py."""

    async def show(_request: Request) -> Response:
        return Response(await page.text(), media_type=CONTENT_TYPE)

    return Route(PATH, show, methods=["GET"], name="metrics", include_in_schema=False)
