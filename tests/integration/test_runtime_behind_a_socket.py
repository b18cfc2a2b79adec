"""The example runtime, whose sandboxes another process makes in another network, keeps every promise."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from polar.config import plugins
from polar.models.session import SessionStatus
from polar.runtimes.base import Host, SandboxSpec, ToolDirectory
from tests.conformance import *  # noqa: F403 - the tests themselves
from tests.conformance import Target, output, spec
from tests.sandboxes import require_runtime
from tests.systems import ASK, shell_task, system

pytestmark = pytest.mark.sandbox
EXAMPLE = Path(__file__).parents[2] / "examples" / "socket-runtime"


@dataclass(frozen=True)
class SandboxServer:
    directory: Path
    socket: Path


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The example, installed as a package in a directory of its own that Python searches."""
    directory = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, directory / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    offline = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(directory / "site"), "."]
    subprocess.run(command, cwd=directory / "source", check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory / "site"))
        patch.setenv("PYTHONPATH", str(directory / "site"))
        for cached in (plugins.names, plugins.load):
            cached.cache_clear()
        yield directory / "site"
    for cached in (plugins.names, plugins.load):
        cached.cache_clear()


@pytest.fixture(scope="module")
def server(plugin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    """The example's server in a process and a network of its own."""
    directory = tmp_path_factory.mktemp("server")
    place = SandboxServer(directory / "sandboxes", directory / "socket")
    module = ("-m", "polar_socket_runtime.server", "--own-network")
    places = ("--socket", str(place.socket), "--directory", str(place.directory))
    process = subprocess.Popen([sys.executable, *module, *places], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith(b"serving sandboxes")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("POLAR_SANDBOX_SOCKET", str(place.socket))
            yield place
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
async def target(server: SandboxServer) -> Target:
    await require_runtime("bubblewrap")
    return Target("socket", elsewhere=server.directory, start_seconds=1.0)


@pytest.fixture
async def gateway() -> AsyncIterator[int]:
    """A server on the node's loopback that says what it is asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"gateway heard " + await reader.readline())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


def network_of(pid: int | str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


async def test_the_gateway_is_reached_through_the_socket(target: Target, host: Host, gateway: int) -> None:
    sandbox = await target.runtime().start(SandboxSpec("s1", "127.0.0.1", gateway), host)
    try:
        address = sandbox.gateway_url.removeprefix("http://").replace(":", "/")
        script = f"""bash -c 'for n in 1 2 3; do
            exec 3<>/dev/tcp/{address}; echo $n >&3; cat <&3; done; ! true </dev/tcp/127.0.0.1/{gateway}'"""
        assert await output(sandbox, script) == "".join(f"gateway heard {n}\n" for n in (1, 2, 3))
        assert await output(sandbox, "readlink /proc/self/ns/net") != network_of("self")
    finally:
        await sandbox.stop()


async def test_tools_are_sent_once_by_their_content(
    target: Target, server: SandboxServer, host: Host, tmp_path: Path
) -> None:
    before = set((server.directory / "tools").glob("*"))
    for number in range(2):
        tool = ToolDirectory(tmp_path / f"copy-{number}", PurePosixPath("/opt/tool"))
        tool.source.mkdir()
        (tool.source / "data").write_text(str(tmp_path))
        sandbox = await target.runtime().start(spec(f"s{number}", tool), host)
        assert await output(sandbox, f"cat {sandbox.tool_path(tool)}/data") == str(tmp_path)
        await sandbox.stop()
    assert len(set((server.directory / "tools").glob("*")) - before) == 1


async def test_a_whole_session_runs_behind_the_socket(target: Target, tmp_path: Path) -> None:
    """Agent, model call, prepared snapshot and evaluation in a fresh sandbox."""
    ask = ASK.replace(sys.executable, "python3")
    task = shell_task(
        "far", ask, runtime=target.name, samples=2, prepare=[{"exec": "echo made > prepared.txt"}],
        evaluator={"name": "command", "options": {"command": "grep fine answer.txt && cat prepared.txt"}},
        allow_no_model_calls=False,
    )  # fmt: skip
    async with system(tmp_path / "data", ["A fine answer."]) as running:
        await running.client.submit(task)
        async with running.node(runtimes=(target.name,)):
            results = await running.client.wait(["far"], timeout=120)
    assert [(result.status, result.reward, result.error) for result in results] == [
        (SessionStatus.COMPLETED, 1.0, None)
    ] * 2
    assert [result.stats.completions for result in results] == [1, 1]


async def test_a_server_that_is_not_there_is_an_outage(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_SANDBOX_SOCKET", str(tmp_path / "absent"))
    assert "no sandbox server" in str(await target.kind.unavailable())
