"""What an agent in a bubblewrap sandbox cannot see, reach or change."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from polar.runtimes.base import Command, Host, Sandbox, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.runtimes.network import GATEWAY_PORT
from tests.waiting import eventually

pytestmark = pytest.mark.sandbox


@asynccontextmanager
async def tcp_server(answer: bytes) -> AsyncIterator[int]:
    """A server on the host's loopback that says `answer` and hangs up."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def started(root: Path, gateway_port: int = 9) -> AsyncIterator[Sandbox]:
    spec = SandboxSpec(root.name, "127.0.0.1", gateway_port)
    sandbox = await BubblewrapRuntime(BubblewrapRuntime.Options()).start(spec, Host(root.parent))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


async def said(sandbox: Sandbox, script: str) -> str:
    """What bash printed, errors included."""
    command = Command(("/bin/bash", "-c", f"exec 2>&1; {script}"))
    result = await sandbox.exec(command, timeout=30, log_name="test")
    return result.stdout.text().strip()


async def test_host_files_are_out_of_sight(tmp_path: Path) -> None:
    other = tmp_path / "other-session"
    other.mkdir()
    (other / "secret").write_text("secret")
    hidden = [
        Path.home(),
        Path.cwd(),
        other / "secret",
        tmp_path,
        Path("/etc/shadow"),
        Path("/sys"),
        Path("/etc/ssh"),
    ]
    async with started(tmp_path / "s1") as sandbox:
        seen = await said(
            sandbox, f"ls -d {' '.join(map(str, hidden))} /root 2>/dev/null; ls /home /tmp /mnt"
        )
    assert "secret" not in seen
    assert not any(line in map(str, hidden) for line in seen.splitlines())


async def test_host_processes_are_out_of_sight(tmp_path: Path) -> None:
    async with started(tmp_path / "s1") as sandbox:
        pids = await said(sandbox, "for p in /proc/[0-9]*; do echo ${p#/proc/}; done")
        assert max(map(int, pids.split())) < 20
        assert "No such process" in await said(sandbox, f"kill -0 {os.getpid()}")


async def test_only_the_gateway_is_reachable(tmp_path: Path) -> None:
    async with (
        tcp_server(b"gateway") as gateway,
        tcp_server(b"other") as other,
        started(tmp_path / "s1", gateway) as sandbox,
    ):
        assert sandbox.gateway_url == f"http://127.0.0.1:{GATEWAY_PORT}"
        assert await said(sandbox, f"cat < /dev/tcp/127.0.0.1/{GATEWAY_PORT}") == "gateway"
        for port in (gateway, other):
            assert "Connection refused" in await said(sandbox, f"cat < /dev/tcp/127.0.0.1/{port}")
        assert "unreachable" in await said(sandbox, "cat < /dev/tcp/192.0.2.1/80")
        assert (await said(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]


async def test_much_data_passes_to_and_from_the_gateway_unchanged(tmp_path: Path) -> None:
    answer = secrets.token_bytes(3_000_000)
    async with tcp_server(answer) as gateway, started(tmp_path / "s1", gateway) as sandbox:
        seen = await said(sandbox, f"cat < /dev/tcp/127.0.0.1/{GATEWAY_PORT} | sha256sum")
    assert seen.split()[0] == hashlib.sha256(answer).hexdigest()


async def test_a_dead_gateway_is_a_closed_connection(tmp_path: Path) -> None:
    async with tcp_server(b"") as gateway:
        pass
    async with started(tmp_path / "s1", gateway) as sandbox:
        assert await said(sandbox, f"cat < /dev/tcp/127.0.0.1/{GATEWAY_PORT}; echo end") == "end"


async def test_no_privileges_and_no_way_to_any(tmp_path: Path) -> None:
    async with started(tmp_path / "s1") as sandbox:
        status = dict(
            line.split(":\t", 1) for line in (await said(sandbox, "cat /proc/self/status")).splitlines()
        )
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"
        assert await said(sandbox, "id -u; id -g; id -un") == "1000\n1000\nagent"
        assert "unshare failed" in await said(sandbox, "unshare --user true")


async def test_nothing_but_its_own_directories_can_be_written(tmp_path: Path) -> None:
    # As root on the host, the agent's user is root to the kernel: modes alone protect nothing in /proc.
    own = ("/workspace", "/home/agent", "/tmp", "/proc/[0-9]*", "/proc/self/*", "/proc/thread-self/*")
    large_and_checked_below = "/usr"
    pruned = " -o ".join(f"-path '{path}'" for path in (*own, large_and_checked_below))
    search = f"find / \\( {pruned} \\) -prune -o -writable ! -type l -print"
    async with started(tmp_path / "s1") as sandbox:
        writable = (await said(sandbox, f"{search} 2>/dev/null")).splitlines()
        devices = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
        allowed = {"/dev/shm", "/dev/pts", "/dev/pts/ptmx", *(f"/dev/{name}" for name in devices)}
        assert [path for path in writable if path not in allowed] == []
        for path in (
            "/x",
            "/usr/x",
            "/etc/x",
            "/run/x",
            "/dev/x",
            "/home/x",
            "/proc/sys/kernel/core_pattern",
        ):
            assert "Read-only file system" in await said(sandbox, f"echo x > {path}"), path


async def test_ordinary_programs_work(tmp_path: Path) -> None:
    script = "set -e; date; mktemp; echo x > /dev/shm/x; echo a | tee /dev/stderr; getent hosts localhost"
    async with started(tmp_path / "s1") as sandbox:
        seen = await said(sandbox, f"{script}; echo fine")
    assert seen.splitlines()[-1] == "fine"


async def test_secrets_are_not_on_any_command_line(tmp_path: Path) -> None:
    secret = secrets.token_hex(16)
    async with started(tmp_path / "s1") as sandbox:
        command = Command(("/bin/sh", "-c", "echo > up; sleep 600"), env={"KEY": secret})
        task = asyncio.create_task(sandbox.exec(command, timeout=60, log_name="test"))
        await eventually((tmp_path / "sessions" / "s1" / "files" / "workspace" / "up").exists)
        lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
        assert any("bwrap" in line for line in lines)
        assert not any(secret in line for line in lines)
        await sandbox.kill()
        await task


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives sandboxes disks")
async def test_a_sandbox_is_made_without_the_disks_of_others(tmp_path: Path) -> None:
    """Otherwise each command would copy the mounts of all, one command at a time in the whole kernel."""
    async with started(tmp_path / "s1") as other, started(tmp_path / "s2") as sandbox:
        assert os.path.ismount(tmp_path / "sessions" / "s1" / "files")
        command = Command(("/bin/sh", "-c", "echo > up; sleep 600"))
        task = asyncio.create_task(sandbox.exec(command, timeout=60, log_name="test"))
        await eventually((tmp_path / "sessions" / "s2" / "files" / "workspace" / "up").exists)
        ours = {process.pid for process in psutil.Process().children(recursive=True)}
        mounts = [
            Path(f"/proc/{process.pid}/mounts").read_text()
            for process in psutil.process_iter(["name"])
            if process.pid in ours and process.info["name"] == "bwrap"
        ]
        assert mounts
        assert not any(str(tmp_path) in seen for seen in mounts)
        await sandbox.kill()
        await task
        assert (await said(other, "echo well")) == "well"


async def test_environment_of_a_command_does_not_touch_the_host(tmp_path: Path) -> None:
    """A preloaded library named by a task must not be loaded by the process that makes the sandbox."""
    async with started(tmp_path / "s1") as sandbox:
        env = {"LD_PRELOAD": "/workspace/evil.so", "LD_DEBUG": "files"}
        result = await sandbox.exec(Command(("/bin/true",), env=env), timeout=20, log_name="test")
    assert "evil.so" in result.stderr.text()
    assert "bwrap" not in result.stderr.text()
