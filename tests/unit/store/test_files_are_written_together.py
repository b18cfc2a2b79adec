"""Files that wait together are synced together, and each is there whole or not at all."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polar.store.file_writer import MOST_TOGETHER, PART, FileWriter


def names_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def path_of(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


async def test_each_file_holds_its_own_bytes(tmp_path: Path) -> None:
    writer = FileWriter()
    contents = {f"{n % 5}/{n}": os.urandom(n * 100) for n in range(MOST_TOGETHER + 40)}
    await asyncio.gather(*(writer.write(f"{tmp_path}/{name}", data) for name, data in contents.items()))
    assert {name: (tmp_path / name).read_bytes() for name in names_below(tmp_path)} == contents


async def test_a_name_appears_after_its_bytes_are_synced_and_before_its_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        steps.append(("sync", str(path_of(descriptor))))

    def noted_replace(source: str, target: str) -> None:
        steps.append(("move", source))
        replace(source, target)

    (tmp_path / "d").mkdir()
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    writer = FileWriter()
    await asyncio.gather(*(writer.write(f"{tmp_path}/d/{n}", b"data") for n in range(20)))
    moves = [place for step, place in steps if step == "move"]
    assert len(moves) == 20
    for part in moves:
        moved = steps.index(("move", part))
        assert ("sync", part) in steps[:moved]
        assert ("sync", str(tmp_path / "d")) in steps[moved:]


async def test_those_that_wait_together_share_the_syncs_of_their_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: Counter[Path] = Counter()
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        synced[path_of(descriptor)] += 1
        fsync(descriptor)

    (tmp_path / "d").mkdir()
    monkeypatch.setattr(os, "fsync", counted)
    writer = FileWriter()
    await asyncio.gather(*(writer.write(f"{tmp_path}/d/{n}", b"data") for n in range(50)))
    assert synced[tmp_path / "d"] == 1
    assert len(names_below(tmp_path)) == 50


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
    writer = FileWriter()
    tried = [f"{n % 3}/{n}" for n in range(60)]
    outcomes = await asyncio.gather(
        *(writer.write(f"{tmp_path}/{name}", name.encode()) for name in tried), return_exceptions=True
    )
    stored = {name for name, outcome in zip(tried, outcomes, strict=True) if outcome is None}
    assert unlucky
    assert len(stored) == len(tried) - len(unlucky)
    assert all(isinstance(outcome, OSError | None) for outcome in outcomes)
    assert names_below(tmp_path) == stored


async def test_one_that_stops_waiting_takes_no_other_along(tmp_path: Path) -> None:
    writer = FileWriter()
    tasks = [asyncio.create_task(writer.write(f"{tmp_path}/{n}", b"data")) for n in range(MOST_TOGETHER * 3)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None for outcome in outcomes[1::2])
    assert names_below(tmp_path) >= {str(n) for n in range(1, len(tasks), 2)}


async def test_what_cannot_be_synced_by_name_is_not_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def broken(descriptor: int) -> None:
        if path_of(descriptor) == tmp_path / "bad":
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "fsync", broken)
    writer = FileWriter()
    outcomes = await asyncio.gather(
        *(writer.write(f"{tmp_path}/{name}/file", b"data") for name in ("good", "bad")),
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), OSError]
