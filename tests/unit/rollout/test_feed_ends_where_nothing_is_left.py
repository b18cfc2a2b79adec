"""An empty page of results says that there are none: nobody who then stops reading has missed one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from polar.client import AsyncClient
from polar.config.settings import ServerSettings
from polar.errors import Unavailable
from polar.models.views import ResultPage
from polar.rollout import service as service_module
from polar.rollout.server import RolloutServer
from polar.store.feeds import Feed, announce
from polar.store.postgres import parsed
from polar.store.store import Store
from tests.databases import fresh_postgres
from tests.fakes.control_plane import complete, idle_task, result_of
from tests.fakes.extensions import register_idle_extensions

TOKEN = "a token for tests only"


@pytest.fixture
def database_url() -> str:
    return fresh_postgres()


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, database_url: str) -> AsyncIterator[Store]:
    register_idle_extensions(monkeypatch)
    async with Store.open(tmp_path, database_url=database_url) as opened:
        yield opened


@pytest.fixture
async def slow(database_url: str, store: Store) -> AsyncIterator[AsyncConnection]:
    """Another server's transaction, which began to store a result before those of the test are stored."""
    engine = create_async_engine(parsed(database_url))
    async with engine.connect() as connection:
        await connection.run_sync(announce, Feed.RESULTS)
        yield connection
    await engine.dispose()


@pytest.fixture
async def client(store: Store) -> AsyncIterator[AsyncClient]:
    async with (
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        AsyncClient(server.url, TOKEN) as connected,
    ):
        yield connected


async def complete_one(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=60)
    await complete(store, lease.key, result_of(lease))


async def test_who_waits_for_a_task_gets_its_result_though_another_is_being_stored(
    store: Store, slow: AsyncConnection, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    after = store.results.after

    async def look(*arguments: Any, **options: Any) -> ResultPage:
        page = await after(*arguments, **options)
        looked.set()
        return page

    monkeypatch.setattr(store.results, "after", look)
    await complete_one(store)
    waiting = asyncio.create_task(client.wait(["task"], timeout=60))
    await looked.wait()
    await slow.rollback()
    assert [result.session_id for result in await waiting] == ["task.0"]


@pytest.mark.usefixtures("slow")
async def test_what_stays_held_back_is_said_to_be_unavailable(
    store: Store, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "ORDER_SECONDS", 0.0)
    assert [page async for page in client.result_pages()] == [ResultPage(results=(), cursor=0, end=0)]
    await complete_one(store)
    with pytest.raises(Unavailable, match="cannot be shown yet"):
        await client.wait(["task"], timeout=60)
