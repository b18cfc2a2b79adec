"""A live control plane in its own thread, so that the sync client can block beside it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polar.config.settings import ServerSettings
from polar.models.session import TrajectoryStats
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import complete, result_of
from tests.fakes.extensions import register_idle_extensions

T = TypeVar("T")


class Plane:
    """A running control plane, and a node that can be told to finish sessions."""

    token = "a token for tests only"

    def __init__(self, url: str, store: Store, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self._store = store
        self._loop = loop

    def finish(self, count: int, reward: float = 1.0, calls: int = 0) -> None:
        """Complete the next `count` waiting sessions as a node would, behind the server's back."""
        told: dict[str, Any] = {"stats": TrajectoryStats(completions=calls), "has_recording": calls > 0}
        recording = b"recorded" if calls else None

        async def work() -> None:
            leases = await self._store.leases.claim("node", limit=count, runtimes=["idle"], seconds=60)
            assert len(leases) == count
            for lease in leases:
                await complete(self._store, lease.key, result_of(lease, reward, **told), recording=recording)

        self.do(work)

    def do(self, work: Callable[[], Awaitable[T]]) -> T:
        async def run() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)


@pytest.fixture
def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    register_idle_extensions(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_SERVER", "POLAR_TOKEN", "POLAR_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    started = threading.Event()
    running: list[Plane] = []
    stop: list[Callable[[], object]] = []

    async def serve() -> None:
        done = asyncio.Event()
        async with (
            Store.open(tmp_path / "data") as store,
            RolloutServer(store, Plane.token, ServerSettings(port=0)) as server,
        ):
            loop = asyncio.get_running_loop()
            running.append(Plane(server.url, store, loop))
            stop.append(lambda: loop.call_soon_threadsafe(done.set))
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(30)
    try:
        yield running[0]
    finally:
        stop[0]()
        thread.join(30)
