"""The dashboard's own files: one page for every address, and the modules and styles it loads.

Nothing here needs a token, because nothing here is data: the page asks for that with its own.
"""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
ASSETS = "/assets"
PAGES = (
    "/",
    "/tasks",
    "/tasks/{id}",
    "/sessions",
    "/sessions/{id}",
    "/compare",
    "/runs",
    "/runs/{id}",
)
"""Addresses within the dashboard; each is answered with the same page, which finds out what to show."""

HEADERS = {
    # What agents write is hostile. It is only ever put on the page as text, and this is the second wall.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; object-src 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked about again every time: a new version's modules never mix with an old one's.
    "Cache-Control": "no-cache",
}


def dashboard_routes() -> list[BaseRoute]:
    """What the control plane serves besides its API."""
    return [
        *(Route(address, _page, methods=["GET"], name="dashboard") for address in PAGES),
        Mount(ASSETS, _Assets(directory=STATIC), name="dashboard assets"),
    ]


def not_found() -> Response:
    """For a person who asks for an address that there is not: the page says so, and leads on."""
    return FileResponse(STATIC / "index.html", 404, headers=HEADERS)


async def _page(_request: object) -> Response:
    return FileResponse(STATIC / "index.html", headers=HEADERS)


class _Assets(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response
