"""Asking a server that may be away for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from polar.errors import Unavailable

log = logging.getLogger(__name__)

PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 30.0, 30.0, 30.0)
"""Between attempts to reach a server that has gone: long enough for it to be started again."""

T = TypeVar("T")


def patiently(ask: Callable[[], T]) -> T:
    """The answer, asked for again while the server cannot be reached."""
    for pause in PAUSES:
        try:
            return ask()
        except Unavailable as error:
            log.warning("%s; asking again in %g s", error, pause)
            time.sleep(pause)
    return ask()
