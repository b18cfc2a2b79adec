"""Blobs that wait together are synced together, and each is there whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polar.errors import Unavailable
from polar.store.blobs import MOST_TOGETHER, PART, BlobName, FileBlobs


def names_below(root: Path) -> set[BlobName | None]:
    return {BlobName.of(path.name) for path in root.rglob("*") if path.is_file()}


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def names(count: int) -> list[BlobName]:
    return [BlobName(f"s.{number}", 1) for number in range(count)]


async def test_each_file_holds_its_own_bytes(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    contents = {name: os.urandom(place * 100) for place, name in enumerate(names(MOST_TOGETHER + 40))}
    await asyncio.gather(*(blobs.put(name, data) for name, data in contents.items()))
    assert {name: blobs.local_path(name).read_bytes() for name in contents} == contents
    assert names_below(tmp_path) == contents.keys()


async def test_a_name_appears_after_its_bytes_are_synced_and_before_its_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str]] = []
    places: dict[str, str] = {}
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        steps.append(("sync", str(path_of(descriptor))))

    def noted_replace(source: str, target: str) -> None:
        replace(source, target)
        steps.append(("move", source))
        places[source] = target

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    blobs = FileBlobs(tmp_path)
    upload = tmp_path / "upload"
    upload.write_bytes(b"data")
    puts = [blobs.put(name, b"data") for name in names(20)]
    await asyncio.gather(*puts, blobs.put(BlobName("s.20", 1), upload))
    assert len(places) == 21
    for part, place in places.items():
        moved = steps.index(("move", part))
        assert ("sync", part) in steps[:moved]
        assert ("sync", str(Path(place).parent)) in steps[moved:]


async def test_those_that_wait_together_share_the_syncs_of_their_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: Counter[Path] = Counter()
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced[path_of(descriptor)] += 1
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", counted)
    blobs = FileBlobs(tmp_path)
    await asyncio.gather(*(blobs.put(name, b"data") for name in names(50)))
    shards = {blobs.local_path(name).parent for name in names(50)}
    assert {synced[shard] for shard in shards} == {1}
    assert names_below(tmp_path) == set(names(50))


@pytest.mark.parametrize("seed", range(4))
async def test_what_fails_harms_no_other_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance = random.Random(seed)
    unlucky: set[str] = set()

    def sometimes(real: Any) -> Any:
        def step(first: Any, *rest: Any) -> Any:
            place = path_of(first) if isinstance(first, int) else Path(first)
            if place.name.startswith(PART) and chance.random() < 0.2:
                unlucky.add(place.name)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(first, *rest)

        return step

    monkeypatch.setattr(os, "fsync", sometimes(os.fsync))
    monkeypatch.setattr(os, "replace", sometimes(os.replace))
    blobs = FileBlobs(tmp_path)
    tried = names(60)
    outcomes = await asyncio.gather(*(blobs.put(name, b"data") for name in tried), return_exceptions=True)
    stored = {name for name, outcome in zip(tried, outcomes, strict=True) if outcome is None}
    assert unlucky
    assert len(stored) == len(tried) - len(unlucky)
    assert all(isinstance(outcome, Unavailable | None) for outcome in outcomes)
    assert names_below(tmp_path) == stored


async def test_one_that_stops_waiting_takes_no_other_along(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    tasks = [asyncio.create_task(blobs.put(name, b"data")) for name in names(MOST_TOGETHER * 3)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None for outcome in outcomes[1::2])
    assert names_below(tmp_path) >= set(names(len(tasks))[1::2])


async def test_what_cannot_be_synced_by_name_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = FileBlobs(tmp_path)
    good, bad = BlobName("s.0", 1), BlobName("s.1", 1)
    assert blobs.local_path(good).parent != blobs.local_path(bad).parent
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if path_of(descriptor) == blobs.local_path(bad).parent:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    outcomes = await asyncio.gather(
        *(blobs.put(name, b"data") for name in (good, bad)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), Unavailable]
