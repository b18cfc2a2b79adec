"""What every runtime promises, checked with real processes on those that need no container engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import psutil
import pytest

from polar.runtimes.base import Host, Sandbox, SandboxError
from polar.runtimes.cgroups import recorded_groups, usable_hierarchies
from polar.runtimes.disk import can_mount_images, mounts_below
from tests.conformance import *  # noqa: F403 - the tests themselves
from tests.conformance import TREE, Target, sh, sleepers
from tests.waiting import eventually


@pytest.fixture(params=["process", pytest.param("bubblewrap", marks=pytest.mark.sandbox)])
def target(request: pytest.FixtureRequest) -> Target:
    return Target(request.param)


async def test_reap_ends_what_a_dead_supervisor_left(
    target: Target, doomed_node: asyncio.subprocess.Process, token: str, host: Host
) -> None:
    (pid_file,) = (host.sandboxes / "s1" / "pids").iterdir()
    supervisor = json.loads(pid_file.read_text())["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    doomed_node.kill()
    await doomed_node.wait()
    os.kill(supervisor, signal.SIGKILL)
    await eventually(lambda: not psutil.pid_exists(supervisor))
    assert await target.kind.reap(host) == 1
    assert sleepers(token) == []
    assert target.left(host) == []


async def test_reap_leaves_neither_mounts_nor_control_groups(
    target: Target, doomed_node: asyncio.subprocess.Process, token: str, host: Host
) -> None:
    groups = recorded_groups(host.sandboxes / "s1")
    mounts = mounts_below(host.directory)
    assert len(groups) == len(usable_hierarchies())
    assert len(mounts) == can_mount_images()
    doomed_node.kill()
    await doomed_node.wait()
    assert await target.kind.reap(host) == 1
    assert not [path for path in groups if path.exists() or path.parent.exists()]
    assert mounts_below(host.directory) == []


async def test_stop_leaves_no_control_groups(sandbox: Sandbox, host: Host) -> None:
    groups = recorded_groups(host.sandboxes / "s1")
    assert len(groups) == len(usable_hierarchies())
    await sandbox.stop()
    assert not [path for path in groups if path.exists() or path.parent.exists()]


async def test_supervisor_death_is_an_error_and_leaves_nothing(
    sandbox: Sandbox, token: str, host: Host
) -> None:
    task = asyncio.create_task(
        sandbox.exec(sh(TREE.format(token) + f"sleep {token}"), timeout=60, log_name="test")
    )
    await eventually(lambda: len(sleepers(token)) >= 5)
    (pid_file,) = (host.sandboxes / "s1" / "pids").iterdir()
    os.kill(json.loads(pid_file.read_text())["pid"], signal.SIGKILL)
    with pytest.raises(SandboxError, match="supervisor"):
        await task
    await eventually(lambda: sleepers(token) == [])
