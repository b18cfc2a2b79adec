"""Retries of calls to a server that cannot be reached for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import ParamSpec, TypeVar

from polar.errors import Unavailable

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0)
"""Seconds between attempts of `retry`: long enough for the server to be started again."""
ENDLESS_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between attempts of `retry_forever`; the last one repeats."""


def retry(call: Callable[[], T]) -> T:
    """The answer to a call; Unavailable once all pauses are over."""
    for pause in PAUSES:
        try:
            return call()
        except Unavailable as error:
            log.warning("%s; asking again in %g s", error, pause)
            time.sleep(pause)
    return call()


async def retry_async(call: Callable[[], Awaitable[T]]) -> T:
    """As `retry`, for a call that is awaited."""
    for pause in PAUSES:
        try:
            return await call()
        except Unavailable as error:
            log.warning("%s; asking again in %g s", error, pause)
            await asyncio.sleep(pause)
    return await call()


async def retry_forever(
    purpose: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The answer to a call, however long the server cannot be reached."""
    for pause in chain(ENDLESS_PAUSES, repeat(ENDLESS_PAUSES[-1])):
        try:
            return await call(*args, **kwargs)
        except Unavailable as error:
            log.warning("could not %s, trying again in %g s: %s", purpose, pause, error)
            await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")
