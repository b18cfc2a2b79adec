"""The door of a process that has no other for people: `/metrics` on a port of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from polar.config.settings import TelemetrySettings
from polar.errors import PolarError
from polar.telemetry.access import bears, is_local
from polar.telemetry.page import CONTENT_TYPE, PATH, MetricsPage

_REFUSED = "read from another machine, this page needs telemetry.metrics_token as bearer token\n"


@asynccontextmanager
async def listening(settings: TelemetrySettings, page: MetricsPage) -> AsyncIterator[str | None]:
    """Show the page while the body runs, at the address that is yielded; None where no port is set."""
    if settings.metrics_port is None:
        yield None
        return

    async def show(request: web.Request) -> web.Response:
        authorization = request.headers.get("authorization")
        if not (is_local(request.remote, request.headers) or bears(authorization, settings.metrics_token)):
            return web.Response(status=401, text=_REFUSED, headers={"WWW-Authenticate": "Bearer"})
        return web.Response(body=await page.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get(PATH, show)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        yield await _open(runner, settings)
    finally:
        await runner.cleanup()


async def _open(runner: web.AppRunner, settings: TelemetrySettings) -> str:
    host, port = settings.metrics_host, settings.metrics_port
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise PolarError(
            f"metrics cannot be shown on {host}:{port}: {error.strerror or error}",
            hint="set telemetry.metrics_port to another port, or to 0 for any free one",
        ) from None
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{runner.addresses[0][1]}{PATH}"
