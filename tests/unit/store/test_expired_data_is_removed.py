"""Retention: what was kept long enough goes, what belongs to no result goes, everything else stays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import insert

from polar.errors import NotFound
from polar.models.session import Lease
from polar.store.blobs import BlobName, open_blobs
from polar.store.retention import Retention, Swept, sweep
from polar.store.store import Store
from polar.store.tables import captures
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

DAY = 86_400.0


@pytest.fixture(params=["file", "memory"])
async def store(
    tmp_path: Path, clock: Clock, database_url: str | None, request: pytest.FixtureRequest
) -> AsyncIterator[Store]:
    url = f"memory://{tmp_path.name}" if request.param == "memory" else None
    async with Store.open(tmp_path, clock, database_url=database_url, blobs_url=url) as opened:
        yield opened


async def finished(store: Store, id: str) -> Lease:
    await store.tasks.submit(idle_task(id))
    (lease,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=10)
    result = result_of(lease, has_recording=True, has_artifacts=True)
    assert await complete(store, lease.key, result, recording=b"recording", artifacts=b"artifacts")
    return lease


async def test_each_kind_is_kept_as_long_as_it_says(store: Store, clock: Clock) -> None:
    old = await finished(store, "old")
    clock.now += 10 * DAY
    new = await finished(store, "new")
    keep = Retention(recordings=20 * DAY, artifacts=5 * DAY, events=5 * DAY, orphans=float("inf"))
    assert await sweep(store, keep) == Swept(artifacts=1, events=2)
    assert await sweep(store, keep) == Swept()
    assert await store.recording(old.session_id)
    with pytest.raises(NotFound, match="has no artifacts"):
        await store.artifact_archive(old.session_id)
    assert await store.artifact_archive(new.session_id)
    assert await store.events.of(old.session_id) == ()
    assert len(await store.events.of(new.session_id)) == 2
    assert len((await store.results.after(0)).results) == 2


async def test_what_a_fenced_off_lease_delivered_goes_after_its_grace(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    (old,) = await store.leases.claim("slow", limit=1, runtimes=["idle"], seconds=10)
    clock.now += 11
    await store.leases.expire(max_attempts=3)
    (new,) = await store.leases.claim("quick", limit=1, runtimes=["idle"], seconds=10)
    await store.recordings.put(BlobName(new.session_id, new.fencing_token), b"mine")
    # The slow node was let in before its lease ended, and writes after.
    await store.recordings.put(BlobName(old.session_id, old.fencing_token), b"too late")
    (stored_at, _) = (await store.recordings.found()).values()
    assert stored_at is not None
    clock.now = stored_at + 60
    assert await sweep(store, Retention(orphans=3600)) == Swept()
    clock.now = stored_at + 7200
    assert await sweep(store, Retention(orphans=3600)) == Swept(orphans=1)
    left = list(await store.recordings.found())
    assert left == [BlobName(new.session_id, new.fencing_token)]


async def test_cursor_of_events_goes_on_after_old_ones_are_gone(store: Store, clock: Clock) -> None:
    await finished(store, "old")
    cursor = (await store.events.after(0)).cursor
    clock.now += 10 * DAY
    await sweep(store, Retention(events=DAY))
    await finished(store, "new")
    assert [event.task_id for event in (await store.events.after(cursor)).events] == ["new", "new"]


async def test_what_is_left_of_the_captures_of_ended_sessions_goes(store: Store) -> None:
    ended = await finished(store, "ended")
    await store.tasks.submit(idle_task("open"))
    (held,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=10)
    pieces = [
        {"session_id": lease.session_id, "fencing_token": 1, "length": 4, "data": b"left"}
        for lease in (ended, held)
    ]
    await store.database.write(lambda connection: connection.execute(insert(captures), pieces) and None)
    assert await sweep(store, Retention()) == Swept(captures=1)
    assert [data async for data in store.captures.read(held.session_id)] == [b"left"]


async def test_memory_and_file_urls_are_places_too(tmp_path: Path) -> None:
    blobs = open_blobs("recordings", tmp_path, f"file://{tmp_path}/elsewhere")
    await blobs.put(BlobName("s.0", 1), b"data")
    path = blobs.local_path(BlobName("s.0", 1))
    assert path is not None
    assert path.is_relative_to(tmp_path / "elsewhere" / "recordings")
    assert path.read_bytes() == b"data"
