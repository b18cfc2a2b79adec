"""A download does not go on after the process that wanted it is gone, however that ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PARENT = """
import asyncio, os, sys
from polar.assets.cache import run_tool

async def main():
    asyncio.create_task(asyncio.to_thread(run_tool, [sys.executable, "-c", sys.argv[1], sys.argv[2]]))
    await asyncio.to_thread(lambda: open(sys.argv[2]).read(1))  # written by the child, once it runs
    os._exit(1)

asyncio.run(main())
"""
CHILD = "import sys, time; fifo = open(sys.argv[1], 'w'); fifo.write('.'); fifo.flush(); time.sleep(600)"


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel ends a child with its parent")
def test_a_downloader_dies_with_its_parent(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    process = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(fifo)])
    assert process.wait(timeout=30) == 1
    left = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-1:] == [str(fifo)]]
    assert not psutil.wait_procs(left, timeout=30)[1]
