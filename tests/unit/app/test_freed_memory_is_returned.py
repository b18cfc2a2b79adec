"""Servers and nodes give freed memory back; a trainer in the same process computes as fast as alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import ModuleType

import pytest

from polar.app.memory import keep_memory_steady

ALLOCATE_IN_THREADS = """
import ctypes
import threading
from polar.app.memory import share_one_heap

share_one_heap()
together = threading.Barrier(4)
kept = []

def allocate():
    together.wait()
    kept.extend(bytes(2_000) for _ in range(1_000))
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
ctypes.CDLL(None).malloc_stats()
"""

FREE_BLOCKS_BETWEEN_KEPT_ONES = """
import asyncio
import psutil
from polar.app.memory import keep_memory_steady

async def main():
    steady = asyncio.create_task(keep_memory_steady(trim_every=0.01))
    await asyncio.sleep(0)
    used = lambda: psutil.Process().memory_full_info().uss
    blocks = [bytes(2_000) for _ in range(20_000)]
    full = used()
    kept = blocks[::20]
    del blocks
    async with asyncio.timeout(20):
        while used() > full - 30_000_000:
            await asyncio.sleep(0)
    steady.cancel()

asyncio.run(main())
"""


def test_threads_have_no_heaps_of_their_own() -> None:
    command = [sys.executable, "-c", ALLOCATE_IN_THREADS]
    stats = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True).stderr
    assert "Arena 0" in stats
    assert "Arena 1" not in stats


def test_memory_between_blocks_that_are_kept_is_returned() -> None:
    subprocess.run([sys.executable, "-c", FREE_BLOCKS_BETWEEN_KEPT_ONES], check=True, timeout=60)


async def test_memory_is_left_alone_where_a_trainer_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    async with asyncio.timeout(10):
        await keep_memory_steady()
