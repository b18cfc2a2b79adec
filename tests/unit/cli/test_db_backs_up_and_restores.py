"""`polar db`: a copy taken beside a server holds everything, and makes a working data directory again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar.cli.main import app
from polar.store.store import Store
from tests.fakes.control_plane import complete, idle_task, result_of


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_CONFIG", "POLAR_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)


def polar(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["db", *arguments])
    return result.exit_code, result.output


def with_store(data_dir: str, work: Callable[[Store], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Store.open(Path(data_dir)) as store:
            await work(store)

    asyncio.run(run())


async def finish_one(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2))
    (lease,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=60)
    await complete(store, lease.key, result_of(lease, has_recording=True), recording=b"tokens")
    # Beside an open store, as beside a server.
    assert await asyncio.to_thread(polar, "backup", "copy", "--data-dir", "data") == (
        0,
        "backed up data to copy\n",
    )
    await store.tasks.submit(idle_task("later"))


def test_back_up_beside_a_server_is_restored_whole() -> None:
    with_store("data", finish_one)
    assert polar("restore", "copy", "--data-dir", "again") == (0, "restored copy to again\n")

    async def look(store: Store) -> None:
        assert [view.spec.id for view in (await store.tasks.page()).tasks] == ["task"]
        blob = await store.recording("task.0")
        assert b"".join([chunk async for chunk in blob.chunks()]) == b"tokens"
        (lease,) = await store.leases.claim("node", limit=5, runtimes=["idle"], seconds=60)
        assert await complete(store, lease.key, result_of(lease))

    with_store("again", look)


def test_what_is_there_is_never_overwritten() -> None:
    with_store("data", finish_one)
    code, output = polar("backup", "copy", "--data-dir", "data")
    assert code == 1
    assert "copy is there already" in output
    code, output = polar("restore", "copy", "--data-dir", "data")
    assert code == 1
    assert "data has a database already" in output


def test_damaged_back_up_is_refused_and_nothing_restored() -> None:
    with_store("data", finish_one)
    Path("copy/polar.db").write_bytes(b"a letter to my aunt" * 1000)
    code, output = polar("restore", "copy", "--data-dir", "again")
    assert code == 1
    assert "is damaged" in output
    assert not Path("again").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["backup", "copy"], "there is no database in"),
        (["restore", "nothing"], "is not a backup"),
    ],
)
def test_wrong_use_is_one_clear_line(arguments: list[str], words: str) -> None:
    code, output = polar(*arguments)
    assert code == 1
    assert words in output
    assert output.count("\n") == 1


def test_postgres_is_left_to_its_own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_DATABASE_URL", "postgresql://nobody:secret@127.0.0.1/polar")
    code, output = polar("backup", "copy")
    assert code == 1
    assert "use pg_dump" in output
    assert "secret" not in output


def test_upgrade_makes_the_database() -> None:
    assert polar("upgrade", "--data-dir", "data")[1].endswith("data/polar.db is up to date\n")
    assert Path("data/polar.db").is_file()
