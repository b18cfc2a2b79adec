"""A recording is on disk whole or not at all, and belongs to the lease whose result was taken."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import Conflict, InvalidInput, NotFound, Unavailable
from polar.models.delivery import Delivery
from polar.models.session import Lease
from polar.store.blobs import BlobName, FileBlobs, recording_path
from polar.store.store import Store
from tests.fakes.control_plane import Clock, complete, idle_task, result_of


async def lease_one(store: Store) -> Lease:
    (lease,) = await store.leases.claim("node", limit=1, runtimes=["idle"], seconds=10)
    return lease


def files_below(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


async def test_bytes_come_back_as_they_were(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path / "recordings")
    name, data = BlobName("s.0", 1), os.urandom(3_000_000)
    await recordings.put(name, data)
    assert recordings.local_path(name).read_bytes() == data
    assert await recordings.exists(name)
    assert recording_path(tmp_path, "s.0") == recordings.local_path(name)
    assert recording_path(tmp_path, "s.1") is None
    await recordings.put(BlobName("s.0", 10), b"later")
    assert recording_path(tmp_path, "s.0") == recordings.local_path(BlobName("s.0", 10))


async def test_a_file_becomes_the_recording(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path / "recordings")
    upload = tmp_path / "upload"
    upload.write_bytes(b"tokens")
    await recordings.put(BlobName("s.0", 1), upload)
    assert [chunk async for chunk in recordings.read(BlobName("s.0", 1))] == [b"tokens"]
    assert files_below(tmp_path) == [recordings.local_path(BlobName("s.0", 1))]


async def test_full_disk_says_so_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    recordings = FileBlobs(tmp_path / "recordings")
    await recordings.put(BlobName("s.0", 1), b"earlier")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        Unavailable, match=r"recordings of session 's\.0' were not stored: the disk .* is full"
    ):
        await recordings.put(BlobName("s.0", 2), b"later")
    assert files_below(tmp_path) == [recordings.local_path(BlobName("s.0", 1))]


async def test_fenced_off_node_cannot_replace_the_recording(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    old = await lease_one(store)
    await store.recordings.put(BlobName("task.0", old.fencing_token), b"old")
    clock.now += 11
    await store.leases.expire(max_attempts=3)
    new = await lease_one(store)
    # The old node's delivery began before its lease ended.
    await store.recordings.put(BlobName("task.0", old.fencing_token), b"old again")
    with pytest.raises(Conflict):
        await complete(store, old.key, result_of(old, has_recording=True), recording=b"late")
    await complete(store, new.key, result_of(new, has_recording=True), recording=b"new")
    path = (await store.recording("task.0")).path
    assert path is not None
    assert path.read_bytes() == b"new"
    assert files_below(path.parent) == [path]


async def test_result_that_promises_a_missing_recording_is_refused(store: Store) -> None:
    await store.tasks.submit(idle_task())
    lease = await lease_one(store)
    result = result_of(lease, has_recording=True)
    with pytest.raises(InvalidInput, match="were not delivered with its result"):
        await complete(store, lease.key, result)
    with pytest.raises(Conflict):
        await complete(store, lease.key.model_copy(update={"fencing_token": 0}), result)
    assert await complete(store, lease.key, result, recording=b"tokens")
    # An answer that was lost: the node delivers again.
    assert not await complete(store, lease.key, result, recording=b"tokens")
    assert [chunk async for chunk in (await store.recording("task.0")).chunks()] == [b"tokens"]


async def test_recording_of_a_session_without_one_is_not_found(store: Store) -> None:
    await store.tasks.submit(idle_task())
    with pytest.raises(NotFound, match="has not ended"):
        await store.recording("task.0")
    lease = await lease_one(store)
    await complete(store, lease.key, result_of(lease))
    with pytest.raises(NotFound, match="has no recording"):
        await store.recording("task.0")


async def test_what_other_leases_delivered_is_removed(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path)
    await recordings.put(BlobName("s.0", 3), b"kept")
    await recordings.put(BlobName("s.0", 2), b"fenced off")
    await recordings.put(BlobName("s.01", 1), b"another's")
    await recordings.keep_only(BlobName("s.0", 3))
    assert (await recordings.found()).keys() == {BlobName("s.0", 3), BlobName("s.01", 1)}


async def test_uploads_that_broke_off_long_ago_are_removed(tmp_path: Path) -> None:
    recordings = FileBlobs(tmp_path)
    await recordings.put(BlobName("s.0", 1), b"whole")
    old, recent = tmp_path / ".part-old", tmp_path / ".part-recent"
    for part in (old, recent):
        part.write_bytes(b"half")
    os.utime(old, (0, 0))
    await recordings.remove_broken_uploads()
    assert not old.exists()
    assert recent.exists()
    assert await recordings.exists(BlobName("s.0", 1))


@given(
    session_id=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,40}\.[0-9]{1,4}\Z"), token=st.integers(1, 2**62)
)
def test_a_file_s_name_tells_whose_it_is(session_id: str, token: int) -> None:
    name = BlobName(session_id, token)
    assert BlobName.of(f"bucket/recordings/{name.path}") == name


@pytest.mark.parametrize("is_late_last", [True, False])
async def test_two_leases_of_a_session_in_one_request_are_told_apart(
    store: Store, clock: Clock, is_late_last: bool
) -> None:
    await store.tasks.submit(idle_task("t"))
    late = await lease_one(store)
    clock.now += 20
    await store.leases.expire(max_attempts=3)
    clock.now += 400
    own = await lease_one(store)
    deliveries = [
        Delivery(key=lease.key, result=result_of(lease, has_recording=True), recording=data)
        for lease, data in ((own, b"own"), (late, b"late"))
    ]
    outcomes = await store.deliver(deliveries if is_late_last else deliveries[::-1])
    taken, refused = outcomes if is_late_last else outcomes[::-1]
    assert taken is True
    assert isinstance(refused, Conflict)
    assert [chunk async for chunk in (await store.recording(own.session_id)).chunks()] == [b"own"]
    assert list(await store.recordings.found()) == [BlobName(own.session_id, own.fencing_token)]
