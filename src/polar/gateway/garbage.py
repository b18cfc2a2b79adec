"""How often the garbage collector looks at a process that serves."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""How many more objects than before make the garbage collector look for cycles among them.

Statements of SQLAlchemy are such cycles: of five times as many a server would keep 10 MiB.
"""


def collect_rarely() -> None:
    """Let the garbage collector pass over what is loaded by now, and look at new objects less often.

    What a request makes is freed as it is dropped. With Python's defaults the collector walks through
    all that is alive every few requests, which takes a quarter of a busy gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
