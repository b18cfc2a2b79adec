"""A feed that is read while others write shows every row once, whatever order they commit in."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sqlalchemy import Connection, insert, select
from sqlalchemy.ext.asyncio import create_async_engine

from polar.models.session import SessionResult, SessionStatus
from polar.store.postgres import parsed
from polar.store.sessions import end
from polar.store.store import Store
from polar.store.tables import results, sessions
from tests.databases import fresh_postgres
from tests.fakes.control_plane import complete, idle_task, result_of


async def test_reader_stops_before_a_number_that_is_not_committed_yet(tmp_path: Path) -> None:
    url = fresh_postgres()
    engine = create_async_engine(parsed(url))
    async with Store.open(tmp_path, database_url=url) as store:
        await store.tasks.submit(idle_task(samples=3))

        def finish(connection: Connection, sample: int) -> None:
            row = connection.execute(select(sessions).where(sessions.c.sample == sample)).one()
            end(connection, [(row, failed(sample))], 0.0)

        async with engine.connect() as slow, engine.connect() as fast:
            await slow.run_sync(finish, 0)
            await fast.run_sync(finish, 1)
            await fast.commit()
            # Number 2 is there, number 1 may still come: neither is shown.
            assert (await store.results.after(0)).results == ()
            assert (await store.events.after(0)).events == ()
            await slow.commit()
        page = await store.results.after(0)
        assert [result.session_id for result in page.results] == ["task.0", "task.1"]
        assert len((await store.events.after(0)).events) == 2
        async with engine.connect() as given_up:
            await given_up.run_sync(finish, 2)
            await given_up.rollback()
        async with engine.begin() as connection:
            await connection.run_sync(finish, 2)
        page = await store.results.after(page.cursor)
        assert [result.session_id for result in page.results] == ["task.2"]
    await engine.dispose()


def failed(sample: int) -> SessionResult:
    return SessionResult(
        session_id=f"task.{sample}",
        task_id="task",
        sample=sample,
        attempt=1,
        status=SessionStatus.FAILED,
        error="a test",
    )


async def test_the_trap_is_real(tmp_path: Path) -> None:
    """Without the announcement the later number is shown first: what the test above would catch."""
    url = fresh_postgres()
    engine = create_async_engine(parsed(url))
    async with Store.open(tmp_path, database_url=url) as store:
        await store.tasks.submit(idle_task(samples=2))

        def row(sample: int) -> dict[str, object]:
            result = failed(sample)
            return {
                "session_id": result.session_id,
                "task_id": "task",
                "run_id": 1,
                "fencing_token": 1,
                "result": result.model_dump_json(),
                "created_at": 0.0,
            }

        async with engine.connect() as slow, engine.connect() as fast:
            await slow.execute(insert(results), [row(0)])
            await fast.execute(insert(results), [row(1)])
            await fast.commit()
            page = await store.results.after(0)
            assert [result.session_id for result in page.results] == ["task.1"]
            await slow.commit()
            assert (await store.results.after(page.cursor)).results == ()
    await engine.dispose()


async def test_reader_beside_many_writers_sees_all_once_and_in_order(
    tmp_path: Path, database_url: str | None
) -> None:
    async with (
        Store.open(tmp_path, database_url=database_url) as one,
        Store.open(tmp_path, database_url=database_url) as two,
    ):
        await one.tasks.submit(idle_task(samples=60))
        leases = await one.leases.claim("node", limit=60, runtimes=["idle"], seconds=60)
        seen: list[str] = []

        async def follow() -> None:
            cursor = 0
            while len(seen) < 60:
                page = await two.results.after(cursor, limit=7)
                seen.extend(result.session_id for result in page.results)
                cursor = page.cursor

        reader = asyncio.create_task(follow())
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(
                    complete(store, lease.key, result_of(lease))
                    for lease, store in zip(leases, [one, two] * 30, strict=True)
                )
            )
            await reader
        everything = (await one.results.after(0, limit=100)).results
        assert seen == [result.session_id for result in everything]
        assert len(set(seen)) == 60
