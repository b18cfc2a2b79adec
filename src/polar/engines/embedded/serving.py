"""The process of `polar engine`: loads the model, then serves it until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from polar.config.settings import EngineSettings
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.server import EmbeddedServer, listen

log = logging.getLogger(__name__)


async def serve(settings: EngineSettings, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Load the configured model and serve it until SIGINT or SIGTERM; `ready` gets the URL."""
    listen(host, port).close()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loading = _load_in_background(settings)
    stopped = asyncio.create_task(stop.wait())
    either: set[asyncio.Future[Any]] = {loading, stopped}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return
    async with EmbeddedServer(await loading, host=host, port=port) as server:
        log.info("serving at %s", server.url)
        ready(server.url)
        await stopped
        log.info("asked to end")


def _load_in_background(settings: EngineSettings) -> asyncio.Future[SlotModel]:
    """The model to come. A daemon thread loads it, since asyncio would wait for one of its own at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[SlotModel] = loop.create_future()

    def run() -> None:
        try:
            outcome = partial(future.set_result, load(settings))
        except BaseException as error:
            outcome = partial(future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(outcome)

    threading.Thread(target=run, name="polar-load", daemon=True).start()
    return future
