"""Calls to the server that are made again and again while it cannot be reached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import ParamSpec, TypeVar

from polar.errors import Unavailable

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses between attempts to reach the server; the last one repeats."""


async def until_reached(
    purpose: str, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs
) -> T:
    """The answer to a call, however long the server cannot be reached."""
    for pause in chain(RETRY_SECONDS, repeat(RETRY_SECONDS[-1])):
        try:
            return await call(*args, **kwargs)
        except Unavailable as error:
            log.warning("could not %s, trying again in %g s: %s", purpose, pause, error)
            await asyncio.sleep(pause)
    raise AssertionError("the pauses never end")
