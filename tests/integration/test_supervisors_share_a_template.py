"""Supervisors are forked from one process: its death costs nothing, and it dies with its node."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path, PurePosixPath

import psutil

from polar.runtimes.base import Host
from polar.runtimes.supervisor import NICENESS
from tests.conformance import Target, output, sh, spec
from tests.waiting import eventually


def template_of(node: int) -> psutil.Process:
    """The process that the supervisors of a node are forked from."""
    (found,) = (
        child
        for child in psutil.Process(node).children()
        if child.status() != psutil.STATUS_ZOMBIE and "supervisor" in Path(child.cmdline()[-2]).name
    )
    return found


async def test_commands_outlive_the_template_and_the_next_has_a_new_one(tmp_path: Path) -> None:
    sandbox = await Target("process").runtime().start(spec("s1"), Host(tmp_path))
    try:
        script = "echo > up; while ! test -e go; do sleep 0.01; done; exit 5"
        running = asyncio.create_task(sandbox.exec(sh(script), timeout=30, log_name="first"))
        await eventually((tmp_path / "sessions/s1/files/workspace/up").exists)
        killed = template_of(os.getpid())
        killed.kill()
        await eventually(lambda: killed.status() == psutil.STATUS_ZOMBIE)
        assert await output(sandbox, "echo on") == "on\n"
        assert template_of(os.getpid()) != killed
        await sandbox.upload(PurePosixPath("go"), b"")
        assert (await running).exit_code == 5
    finally:
        await sandbox.stop()


async def test_commands_give_way_to_who_serves_them(tmp_path: Path) -> None:
    sandbox = await Target("process").runtime().start(spec("s1"), Host(tmp_path))
    try:
        assert int(await output(sandbox, "nice")) == os.nice(0) + NICENESS
    finally:
        await sandbox.stop()


async def test_descriptors_and_processes_do_not_add_up(tmp_path: Path) -> None:
    sandbox = await Target("process").runtime().start(spec("s1"), Host(tmp_path))
    try:
        await output(sandbox, "true")
        kept = template_of(os.getpid())
        before = len(os.listdir("/proc/self/fd")), kept.num_fds()
        for _ in range(20):
            await output(sandbox, "true")
        assert (len(os.listdir("/proc/self/fd")), kept.num_fds()) == before
        assert kept.children() == []
    finally:
        await sandbox.stop()


NODE = """
import asyncio, sys
from pathlib import Path
from polar.runtimes.base import Command, Host, SandboxSpec
from polar.runtimes.process import ProcessRuntime
async def main(root):
    runtime = ProcessRuntime(ProcessRuntime.Options())
    sandbox = await runtime.start(SandboxSpec("s1", "127.0.0.1", 9), Host(Path(root)))
    await sandbox.exec(Command(("true",)), timeout=60, log_name="agent")
    await sandbox.stop()
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""


async def test_the_template_dies_with_a_killed_node(tmp_path: Path) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(tmp_path / "s1"), stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    await node.stdout.readline()
    template = template_of(node.pid)
    node.kill()
    await node.wait()
    await eventually(lambda: not template.is_running())
