"""What only containers have: an image, its own files, and programs of the host mounted into it."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest

from polar.assets.node import node
from polar.runtimes.base import (
    Command,
    Host,
    ImageNotFound,
    PathRefused,
    SandboxError,
    SandboxSpec,
    ToolDirectory,
)
from polar.runtimes.network import GATEWAY_PORT, PROXY_PORT
from tests.conformance import Target, output, sh, spec


@pytest.fixture
async def gateway() -> AsyncIterator[int]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"gateway")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_only_the_gateway_is_reachable(target: Target, gateway: int, host: Host) -> None:
    sandbox = await target.runtime().start(SandboxSpec("s1", "127.0.0.1", gateway), host)
    try:
        assert await output(sandbox, f"nc 127.0.0.1 {GATEWAY_PORT} </dev/null") == "gateway"
        for address in (f"127.0.0.1 {gateway}", f"192.0.2.1 {gateway}"):
            result = await sandbox.exec(sh(f"nc -w 2 {address} </dev/null"), timeout=20, log_name="test")
            assert result.exit_code != 0
            assert result.stdout.text() == ""
        assert (await output(sandbox, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
    finally:
        await sandbox.stop()


async def test_a_listed_server_is_reached_through_the_proxy(target: Target, gateway: int, host: Host) -> None:
    runtime = target.runtime(network={"allow": [f"localhost:{gateway}"]})
    sandbox = await runtime.start(SandboxSpec("s1", "127.0.0.1", gateway), host)
    try:
        for port, told in ((gateway, "gateway"), (1, "403 Forbidden")):
            ask = f"printf 'CONNECT localhost:{port} HTTP/1.1\\r\\n\\r\\n' | nc 127.0.0.1 {PROXY_PORT}"
            assert told in await output(sandbox, ask)
        assert await output(sandbox, f"nc 127.0.0.1 {GATEWAY_PORT} </dev/null") == "gateway"
    finally:
        await sandbox.stop()


async def test_a_harness_and_its_node_run_from_a_read_only_mount(target: Target, host: Host) -> None:
    tool = ToolDirectory(node(), PurePosixPath("/opt/polar/node"))
    sandbox = await target.runtime().start(spec("s1", tool), host)
    try:
        script = "require('fs').writeFileSync('made', 'by node ' + process.versions.node.split('.')[0])"
        command = Command((str(sandbox.tool_path(tool) / "bin" / "node"), "-e", script))
        result = await sandbox.exec(command, timeout=30, log_name="test")
        assert result.exit_code == 0, result.stderr.text()
        assert (await sandbox.download(PurePosixPath("made"))).startswith(b"by node 2")
        assert "Read-only" in await output(sandbox, "touch /opt/polar/node/x 2>&1 || true")
    finally:
        await sandbox.stop()


async def test_the_images_own_files_cannot_be_changed_unless_asked(target: Target, host: Host) -> None:
    sandbox = await target.runtime().start(spec("s1"), host)
    assert "Read-only" in await output(sandbox, "touch /testbed/x 2>&1 || true")
    assert "CapEff:\t0000000000000000" in await output(sandbox, "cat /proc/self/status")
    await sandbox.stop()


async def test_a_workspace_of_the_image_is_used_and_kept_in_snapshots(target: Target, host: Host) -> None:
    runtime = target.runtime(root="writable", workspace="/testbed")
    prepared = await runtime.start(spec("s0"), host)
    assert await output(prepared, "pwd; cat README; echo built > built") == "/testbed\nfrom the image\n"
    await prepared.upload(PurePosixPath("dir/given"), b"given")
    assert await prepared.download(PurePosixPath("built")) == b"built\n"
    await prepared.snapshot("prepared")
    await prepared.stop()
    sample = await runtime.start(SandboxSpec("s1", "127.0.0.1", 9, base="prepared"), host)
    assert await output(sample, "cat built dir/given") == "built\ngiven"
    # Where the engine lets it replace the directory by a link, that leads nowhere either.
    await sample.exec(sh("cd /; rm -rf /testbed; ln -s /etc /testbed"), timeout=20, log_name="test")
    with pytest.raises(SandboxError):
        await sample.download(PurePosixPath("hostname"))
    with suppress(PathRefused):
        await sample.upload(PurePosixPath("planted"), b"x")
    assert not Path("/etc/planted").exists()
    await sample.stop()
    await runtime.discard("prepared", host)


async def test_an_unknown_image_is_said(target: Target, host: Host) -> None:
    with pytest.raises(ImageNotFound, match="no-such-image"):
        await target.runtime(image="localhost/no-such-image").start(spec("s1"), host)
    assert target.left(host) == []


def containers(engine: str) -> list[str]:
    """Those of all nodes."""
    order = (engine, "ps", "--all", "--quiet", "--filter", "label=polar.node")
    return subprocess.run(order, capture_output=True, text=True, check=True).stdout.split()


async def test_reap_removes_containers_whose_directories_are_gone(target: Target, host: Host) -> None:
    runtime = target.runtime()
    sandbox = await runtime.start(spec("s1"), host)
    assert await asyncio.to_thread(containers, target.name)
    assert await target.kind.reap(host) == 1
    assert not await asyncio.to_thread(containers, target.name)
    assert target.left(host) == []
    await sandbox.stop()
