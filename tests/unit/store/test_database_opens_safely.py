"""A database is made, migrated and reopened without losing anything, by several processes at once."""

from __future__ import annotations

import _sqlite3
import asyncio
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, text

from polar.errors import Conflict, PolarError, Unavailable
from polar.store.database import Database
from polar.store.sqlite import READER_CACHE_KIB, READERS, SqliteDatabase
from polar.store.store import Store
from polar.store.tasks import Tasks
from tests.databases import postgres_url
from tests.fakes.control_plane import complete, idle_task, result_of

OPEN_AND_SUBMIT = """
import asyncio, sys
from pathlib import Path
from polar.store.store import Store
from tests.databases import postgres_url
from tests.fakes.control_plane import idle_task

async def main():
    async with Store.open(Path(sys.argv[1]), database_url=sys.argv[2] or None) as store:
        await store.tasks.submit(idle_task(sys.argv[3]))

asyncio.run(main())
"""

SUBMIT_AND_BE_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from polar.store.store import Store
from tests.databases import postgres_url
from tests.fakes.control_plane import idle_task

async def main():
    async with Store.open(Path(sys.argv[1])) as store:
        await store.tasks.submit(idle_task("acknowledged", samples=4))
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def python(program: str, *arguments: object) -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, *map(str, arguments))
    return await process.wait()


async def test_reopening_keeps_tasks_leases_and_results(tmp_path: Path, database_url: str | None) -> None:
    async with Store.open(tmp_path, database_url=database_url) as store:
        await store.tasks.submit(idle_task(samples=3))
        first, second = await store.leases.claim("node", limit=2, runtimes=["idle"], seconds=60)
        await complete(store, first.key, result_of(first))
        before = await store.sessions.page()
    async with Store.open(tmp_path, database_url=database_url) as store:
        assert await store.sessions.page() == before
        assert await complete(store, second.key, result_of(second))
        assert len((await store.results.after(0)).results) == 2


async def test_processes_that_start_at_once_share_one_database(
    tmp_path: Path, empty_place: Path | str
) -> None:
    url = empty_place if isinstance(empty_place, str) else ""
    codes = await asyncio.gather(*(python(OPEN_AND_SUBMIT, tmp_path, url, f"t{n}") for n in range(4)))
    assert codes == [0, 0, 0, 0]
    async with Store.open(tmp_path, database_url=url or None) as store:
        assert {view.spec.id for view in (await store.tasks.page()).tasks} == {"t0", "t1", "t2", "t3"}


async def test_acknowledged_task_survives_kill_9(tmp_path: Path) -> None:
    assert await python(SUBMIT_AND_BE_KILLED, tmp_path) == -9
    async with Store.open(tmp_path) as store:
        assert (await store.tasks.get("acknowledged")).spec.samples == 4
        assert len((await store.sessions.page()).sessions) == 4


async def test_database_from_the_future_is_refused(empty_place: Path | str) -> None:
    async with Database.open(empty_place) as database:
        await database.write(
            lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
        )
    with pytest.raises(PolarError, match="made by a newer Polar"):
        async with Database.open(empty_place):
            pass


async def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "polar.db").write_text("a letter to my aunt, long enough to have a header" * 20)
    with pytest.raises(PolarError, match="is not a Polar database"):
        async with Store.open(tmp_path):
            pass


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://nobody:secret@127.0.0.1:1/polar", r"postgresql://nobody:\*\*\*@.* cannot be reached"),
        ("mysql://host/polar", "'mysql' is not supported"),
        ("polar", "not a URL"),
    ],
)
async def test_wrong_address_is_one_clear_line_without_the_password(url: str, words: str) -> None:
    with pytest.raises(PolarError, match=words) as caught:
        async with Database.open(url):
            pass
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_database_that_is_not_there_is_one_clear_line() -> None:
    with pytest.raises(PolarError, match=r"/nowhere\S* is not there \(make it with `createdb`\)"):
        async with Database.open(postgres_url("nowhere")):
            pass


def fill(free_pages: int) -> Callable[[Connection], None]:
    """Leave the database room for this many pages more."""

    def limit(connection: Connection) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages + free_pages}")

    return limit


async def test_full_disk_stores_nothing_and_says_so(tmp_path: Path) -> None:
    async with Database.open(tmp_path / "polar.db") as database:
        tasks = Tasks(database)
        await tasks.submit(idle_task("before"))
        await database.write(fill(1))
        with pytest.raises(Unavailable, match="is full; nothing was stored"):
            await tasks.submit(idle_task("big", instruction="x" * 100_000))
        assert [view.spec.id for view in (await tasks.page()).tasks] == ["before"]


async def test_writers_that_share_a_commit_fail_alone(tmp_path: Path) -> None:
    async with Database.open(tmp_path / "polar.db") as database:
        tasks = Tasks(database)
        await tasks.submit(idle_task("taken"))
        await database.write(fill(8))
        outcomes = await asyncio.gather(
            tasks.submit(idle_task("one")),
            tasks.submit(idle_task("taken", samples=2)),
            tasks.submit(idle_task("big", instruction="x" * 1_000_000)),
            tasks.submit(idle_task("two")),
            return_exceptions=True,
        )
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [tuple, Conflict, Unavailable, tuple]
        assert {view.spec.id for view in (await tasks.page()).tasks} == {"taken", "one", "two"}


async def test_everyone_who_waits_for_a_commit_hears_that_it_failed(tmp_path: Path) -> None:
    async with Database.open(tmp_path / "polar.db") as database:

        def fail(connection: Connection) -> None:
            raise RuntimeError("no commit today")

        event.listen(Engine, "commit", fail)
        try:
            async with asyncio.timeout(10):
                outcomes = await asyncio.gather(
                    *(database.write(lambda connection: None) for _ in range(3)), return_exceptions=True
                )
        finally:
            event.remove(Engine, "commit", fail)
        assert [str(outcome) for outcome in outcomes] == ["no commit today"] * 3
        assert await database.write(lambda connection: "as before") == "as before"


async def test_readers_hold_little_of_a_large_file_in_memory(tmp_path: Path) -> None:
    """A server that runs for long knows all of its file: four readers, and each its own part of it."""
    database = SqliteDatabase(tmp_path / "large.db", time.time)
    await database.connect()

    def fill(connection: Connection) -> None:
        connection.exec_driver_sql("CREATE TABLE rows (text TEXT)")
        for _ in range(4_000):
            connection.exec_driver_sql("INSERT INTO rows VALUES (hex(randomblob(1000)))")

    def read(connection: Connection) -> int:
        ready.wait()
        return int(connection.exec_driver_sql("SELECT sum(length(text)) FROM rows").scalar_one())

    await database.write(fill)
    before, ready = _sqlite_memory(), threading.Barrier(READERS)
    sums = await asyncio.gather(*(database.read(read) for _ in range(READERS)))
    grown = _sqlite_memory() - before
    await database.close()
    assert sums == [8_000_000] * READERS
    assert grown < 2 * READERS * READER_CACHE_KIB * 1024


def _sqlite_memory() -> int:
    """What SQLite has taken, in bytes."""
    used = ctypes.CDLL(_sqlite3.__file__).sqlite3_memory_used
    used.restype = ctypes.c_int64
    return int(used())
