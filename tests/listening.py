"""Real HTTP servers of tests: an application of aiohttp on a free port of this machine."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def listening(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The address at which the application answers while the block runs."""
    # What is being answered ends with the client that asked, and with the block.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        port = runner.addresses[0][1]
        yield f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()
