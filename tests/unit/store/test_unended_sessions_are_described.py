"""Where the suite of faults gives up, it tells what each session that has not ended waits for."""

from __future__ import annotations

from pathlib import Path

from polar.models.session import FailureReason, SessionStatus
from polar.store.delivery import Retries
from polar.store.store import Store
from tests.fakes.control_plane import complete, idle_task, result_of
from tests.faults.unended import describe_unended


async def test_what_is_held_and_what_is_put_off_is_told_with_its_last_events(
    store: Store, tmp_path: Path, database_url: str | None
) -> None:
    await store.tasks.submit(idle_task("t", samples=3))
    failed, _, ended = await store.leases.claim("north", limit=3, runtimes=["idle"], seconds=30)
    disturbed = result_of(
        failed, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE, error="the disk is full"
    )
    await complete(store, failed.key, disturbed, retries=Retries(3, 10.0))
    await complete(store, ended.key, result_of(ended))
    put_off, *happened, held, _ = (
        await describe_unended(database_url or tmp_path / "data" / "polar.db")
    ).splitlines()
    assert put_off.startswith("t.0: queued, attempt 1, lease 1 of None until -, not before -")
    assert [line.partition(" s ")[2] for line in happened] == [
        "init, attempt 1, north",
        "queued, attempt 1, north: the disk is full",
    ]
    assert held.startswith("t.1: init, attempt 1, lease 1 of north until -")


async def test_a_database_that_cannot_be_read_hides_no_stall(tmp_path: Path) -> None:
    (tmp_path / "polar.db").write_text("no database")
    assert "not a Polar database" in await describe_unended(tmp_path / "polar.db")
