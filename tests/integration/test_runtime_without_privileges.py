"""Limits without control groups or disks of their own: the supervisor looks, and ends what is too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.runtimes import cgroups, disk, local
from polar.runtimes.base import Host, Limit, Sandbox
from tests.conformance import Target, output, sh, spec


@pytest.fixture(params=["process", pytest.param("bubblewrap", marks=pytest.mark.sandbox)])
async def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sandbox]:
    monkeypatch.setattr(cgroups, "usable_hierarchies", lambda: ())
    monkeypatch.setattr(disk, "can_mount_images", lambda: False)
    monkeypatch.setattr(disk, "can_mount_overlays", lambda: False)
    runtime = Target(request.param).runtime(limits={"memory": "96MiB", "pids": 48, "disk": "32MiB"})
    started = await runtime.start(spec("s1"), Host(tmp_path))
    yield started
    await started.stop()


@pytest.mark.parametrize(
    ("script", "limit"),
    [
        ("i=0; while [ $i -lt 70 ]; do sleep 5 & i=$((i+1)); done; sleep 5", Limit.PIDS),
        ("head -c 600000000 /dev/zero | tail; sleep 5", Limit.MEMORY),
        (
            "i=0; while [ $i -lt 100 ]; do head -c 1000000 /dev/zero > f$i; i=$((i+1)); done; sleep 5",
            Limit.DISK,
        ),
    ],
)
async def test_what_is_too_much_is_seen_and_ended(sandbox: Sandbox, script: str, limit: Limit) -> None:
    result = await sandbox.exec(sh(script), timeout=20, log_name="test")
    assert result.exit_code != 0
    assert not result.timed_out
    assert result.limits_hit == {limit}


async def test_enforcement_says_so(sandbox: Sandbox) -> None:
    told = await asyncio.to_thread(local.enforcement)
    assert (told["memory"], told["pids"], told["disk"]) == ("watched", "watched", "watched")
    assert told["snapshots"] == "copied"


async def test_a_large_single_file_is_cut_by_the_kernel(sandbox: Sandbox) -> None:
    script = "head -c 60000000 /dev/zero > big; stat -c %s big; rm big"
    assert int(await output(sandbox, script)) <= 32 * 1024 * 1024
