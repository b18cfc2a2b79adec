"""A recording is on disk whole or not at all, and belongs to the lease whose result was taken."""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import Conflict, NotFound, Unavailable
from polar.models.session import Lease
from polar.store.blobs import BlobName, recording_path
from polar.store.file_blobs import FileBlobs
from polar.store.store import Store
from tests.fakes.control_plane import Clock, idle_task, result_of


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def lease_one(store: Store) -> Lease:
    (lease,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=10)
    return lease


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


async def test_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path / "recordings")
    data = os.urandom(3_000_000)
    await recordings.put(BlobName("s.0", 1), chunks(data[:10], data[10:2_000_000], data[2_000_000:]))
    assert recordings.path("s.0", 1).read_bytes() == data
    assert await recordings.exists(BlobName("s.0", 1))
    assert recording_path(tmp_path, "s.0") == recordings.path("s.0", 1)
    assert recording_path(tmp_path, "s.1") is None


async def test_interrupted_upload_leaves_nothing(tmp_path: Path) -> None:
    async def breaks_off() -> AsyncIterator[bytes]:
        yield b"x" * 2_000_000
        raise ConnectionResetError("the node died")

    recordings = FileBlobs(tmp_path)
    with pytest.raises(Unavailable):
        await recordings.put(BlobName("s.0", 1), breaks_off())
    assert files_below(tmp_path) == []


async def test_full_disk_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recordings = FileBlobs(tmp_path / "recordings")
    await recordings.put(BlobName("s.0", 1), chunks(b"earlier"))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        Unavailable, match=r"recordings of session 's\.0' were not stored: the disk .* is full"
    ):
        await recordings.put(BlobName("s.0", 2), chunks(b"later"))
    assert files_below(tmp_path) == [recordings.path("s.0", 1)]


async def test_fenced_off_node_cannot_replace_the_recording(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    old = await lease_one(store)
    await store.recordings.put(BlobName("task.0", old.fencing_token), chunks(b"old"))
    clock.now += 11
    await store.leases.expire(max_attempts=3)
    new = await lease_one(store)
    await store.recordings.put(BlobName("task.0", new.fencing_token), chunks(b"new"))
    # The old node was let in before its lease ended and writes last.
    await store.recordings.put(BlobName("task.0", old.fencing_token), chunks(b"old again"))
    await store.complete("task.0", new.key, result_of(new, has_recording=True))
    path = (await store.recording("task.0")).path
    assert path is not None
    assert path.read_bytes() == b"new"
    assert files_below(path.parent) == [path]


async def test_result_that_promises_a_missing_recording_is_refused(store: Store) -> None:
    await store.tasks.submit(idle_task())
    lease = await lease_one(store)
    result = result_of(lease, has_recording=True)
    with pytest.raises(NotFound, match="were not delivered before its result"):
        await store.complete("task.0", lease.key, result)
    with pytest.raises(Conflict):
        await store.complete("task.0", lease.key.model_copy(update={"fencing_token": 0}), result)
    await store.recordings.put(BlobName("task.0", lease.fencing_token), chunks(b""))
    assert await store.complete("task.0", lease.key, result)
    assert [chunk async for chunk in (await store.recording("task.0")).chunks()] == []


async def test_recording_of_a_session_without_one_is_not_found(store: Store) -> None:
    await store.tasks.submit(idle_task())
    with pytest.raises(NotFound, match="has not ended"):
        await store.recording("task.0")
    lease = await lease_one(store)
    await store.complete("task.0", lease.key, result_of(lease))
    with pytest.raises(NotFound, match="has no recording"):
        await store.recording("task.0")


def stored_early(root: Path, name: BlobName, data: bytes) -> Path:
    """A blob as it was stored when each session had a directory of its own."""
    path = root / name.path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


async def test_what_an_early_store_holds_is_read_found_and_let_go(tmp_path: Path) -> None:
    name, other = BlobName("s.0", 1), BlobName("s.0", 2)
    early = stored_early(tmp_path / "recordings", name, b"early")
    recordings = FileBlobs(tmp_path / "recordings")
    assert await recordings.exists(name)
    assert [chunk async for chunk in recordings.read(name)] == [b"early"]
    assert recordings.local_path(name) == recording_path(tmp_path, "s.0") == early
    await recordings.put_whole(other, b"late")
    assert {stored.name for stored in await recordings.found()} == {name, other}
    assert recording_path(tmp_path, "s.0") == recordings.local_path(other)
    await recordings.remove([name])
    assert not await recordings.exists(name)
    assert not early.parent.exists()
    assert [stored.name for stored in await recordings.found()] == [other]


async def test_an_early_lease_s_blob_goes_when_a_later_one_s_result_is_taken(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path)
    early = stored_early(tmp_path, BlobName("s.0", 1), b"early")
    await recordings.put_whole(BlobName("s.0", 3), b"kept")
    await recordings.put_whole(BlobName("s.0", 2), b"fenced off")
    await recordings.put_whole(BlobName("s.01", 1), b"another's")
    await recordings.keep_only(BlobName("s.0", 3))
    assert not early.parent.exists()
    assert {stored.name for stored in await recordings.found()} == {BlobName("s.0", 3), BlobName("s.01", 1)}


async def test_a_blob_delivered_again_after_an_upgrade_is_the_one_that_counts(tmp_path: Path) -> None:
    name = BlobName("s.0", 1)
    stored_early(tmp_path, name, b"early")
    recordings = FileBlobs(tmp_path)
    await recordings.put_whole(name, b"again")
    assert recordings.local_path(name).read_bytes() == b"again"
    await recordings.remove([name])
    assert await recordings.found() == []


async def test_uploads_that_broke_off_long_ago_are_let_go(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path)
    await recordings.put_whole(BlobName("s.0", 1), b"whole")
    shard = recordings.path("s.0", 1).parent
    old, recent = shard / ".part-old", shard / ".part-recent"
    for part in (old, recent):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    await recordings.remove([])
    assert not old.exists()
    assert recent.exists()
    assert await recordings.exists(BlobName("s.0", 1))


@given(
    session_id=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,40}\.[0-9]{1,4}\Z"), token=st.integers(1, 2**62)
)
def test_a_file_s_name_tells_whose_it_is(session_id: str, token: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        recordings = FileBlobs(Path(directory))
        name = BlobName(session_id, token)
        for place in (recordings.path(session_id, token), Path(directory) / name.path):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
            assert [stored.name for stored in asyncio.run(recordings.found())] == [name]
            place.unlink()
