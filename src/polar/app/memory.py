"""Keeps the memory of a process that serves for days from growing."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys

LARGE_BLOCK = 256 * 1024
"""More bytes than reading the JSON of an ordinary call takes: pages of its own cost a tenth of the call."""
TRIM_SECONDS = 10.0
YOUNG_OBJECTS = 10_000
"""The number of new objects after which the garbage collector looks for cycles among them.

SQLAlchemy's statements are such cycles; with five times as many, a server would keep 10 MiB.
"""
OLDER_EVERY = 2
"""Every second collection includes the next older generation, and every second of those everything else.

With Python's default of ten, cycles held until a session's end were found thousands of sessions later.
"""
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Constants of <malloc.h>."""


def share_one_heap() -> None:
    """Have all threads, which must not have begun yet, allocate from one heap, and large buffers from none.

    The C library keeps freed blocks on the heap. Long-lived objects come to lie between them, and a node that
    runs for days grows by the gaps, most of all in heaps that threads have to themselves. Large buffers are
    pages of their own.
    """
    if (c_library := _c_library()) is not None:
        c_library.mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK)
        c_library.mallopt(_M_ARENA_MAX, 1)


async def keep_memory_steady(*, trim_every: float = TRIM_SECONDS) -> None:
    """Collect garbage less often, and return the heap's gaps to the system, until cancelled."""
    _collect_rarely()
    if (c_library := _c_library()) is None:
        return
    while True:
        await asyncio.sleep(trim_every)
        await asyncio.to_thread(c_library.malloc_trim, 0)


def _c_library() -> ctypes.CDLL | None:
    """Return the C library, if its heap is to be managed.

    It is left alone where a trainer computes in the process: its tensors come and go all the time, and new
    pages for each cost a third more CPU time.
    """
    c_library = ctypes.CDLL(None)
    return None if "torch" in sys.modules or not hasattr(c_library, "malloc_trim") else c_library


def _collect_rarely() -> None:
    """Exempt everything loaded by now from garbage collection, and collect new objects less often.

    What a request creates is freed when it is dropped. With Python's defaults the collector walks all live
    objects every few requests, which takes a quarter of a busy gateway's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, OLDER_EVERY, OLDER_EVERY)
