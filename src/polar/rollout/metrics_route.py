"""`GET /metrics`: the page of everything that runs in the server's process."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.rollout.gate import caller_of
from polar.rollout.problems import problem
from polar.telemetry.access import is_local
from polar.telemetry.page import CONTENT_TYPE, PATH, MetricsPage


def metrics_route(page: MetricsPage) -> Route:
    """Open to this machine, to others with a token that may read; see rollout/access.py."""

    async def show(request: Request) -> Response:
        caller = caller_of(request)
        # A proxy on this machine stands between: the gate has seen its address, not the reader's.
        if caller.holder is None and not is_local(caller.address, request.headers):
            needed = "through a proxy, metrics need a token of the role read-only"
            return problem(401, "unauthorized", needed, {"WWW-Authenticate": "Bearer"})
        return Response(await page.text(), media_type=CONTENT_TYPE)

    return Route(PATH, show, methods=["GET"], name="metrics", include_in_schema=False)
