"""Several nodes on one machine: each has its process and gateway, one that dies comes back, all end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from polar.app import node_processes
from polar.app.stack import running
from polar.client import AsyncClient
from polar.client.connection import pinned
from polar.config.settings import EngineSettings, Settings
from polar.errors import Backoff, Unavailable
from polar.models.session import SessionStatus
from polar.models.views import SessionView
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import VllmWire, vllm_wire
from tests.systems import ASK, RUNTIMES, shell_task

SECONDS = 60.0
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def wire() -> AsyncIterator[VllmWire]:
    async with vllm_wire(Said("Hello."), takes_orders=True) as serving:
        yield serving


def two_nodes(directory: Path, wire: VllmWire, **changes: Any) -> Settings:
    document = {
        "data_dir": directory / "data",
        "server": {"port": 0, "lease_seconds": 3},
        "engine": EngineSettings(url=wire.url, mode="chat"),
        "node": {"count": 2, "run_slots": 1, "ready_buffer": 0, "runtimes": RUNTIMES},
    }
    return Settings.model_validate({**document, **changes})


def node_process(name: str) -> psutil.Process:
    """The process that holds the directory of a node."""
    (found,) = [
        child
        for child in psutil.Process().children()
        if any(f"/nodes/{name}/lock" in file.path for file in child.open_files())
    ]
    return found


async def sessions_that(client: AsyncClient, status: SessionStatus, *ids: str) -> list[SessionView]:
    async with asyncio.timeout(SECONDS):
        while True:
            sessions = [await client.session(id) for id in ids]
            if all(session.status is status for session in sessions):
                return sessions


def waiting_for(gate: Path) -> str:
    return f"until [ -e {gate} ]; do sleep 0.1; done\n{ASK}"


async def test_each_has_its_own_gateway_and_all_of_them_follow_the_policy(
    tmp_path: Path, wire: VllmWire, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    async with (
        running(two_nodes(tmp_path, wire), said.append) as stack,
        AsyncClient(stack.url, stack.token) as client,
    ):
        nodes = [node_process(name) for name in ("local-1", "local-2")]
        await client.submit(shell_task("t", waiting_for(tmp_path / "gate"), samples=2))
        sessions = await sessions_that(client, SessionStatus.RUNNING, "t.0", "t.1")
        assert {session.node for session in sessions} == {"local-1", "local-2"}
        view = await client.update_policy(None, version=3)
        assert {node.node: node.version for node in view.nodes} == {"local-1": 3, "local-2": 3}
        (tmp_path / "gate").touch()
        results = await client.wait(["t"], timeout=SECONDS)
        assert [(result.reward, result.policy_version_min) for result in results] == [(1.0, 3)] * 2
        listening = [
            {at.laddr.port for at in node_process(name).net_connections("tcp") if at.status == "LISTEN"}
            for name in ("local-1", "local-2")
        ]
        assert [len(ports) for ports in listening] == [1, 1]
        assert listening[0] != listening[1]
    assert {line for line in said if "ready as" in line} == {
        "local-1: ready as local-1 with small",
        "local-2: ready as local-2 with small",
    }
    assert not psutil.wait_procs(nodes, timeout=30)[1]
    # They end because the system does: that is nothing to tell.
    said_besides = capfd.readouterr().err
    assert "once more to stop" not in said_besides
    assert "given back" not in said_besides


async def test_one_that_dies_is_started_again_and_loses_no_session(
    tmp_path: Path, wire: VllmWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_processes, "RESTARTS", Backoff(0.1, 60.0))
    async with (
        running(two_nodes(tmp_path, wire), lambda _step: None) as stack,
        AsyncClient(stack.url, stack.token) as client,
    ):
        await client.submit(shell_task("t", waiting_for(tmp_path / "gate"), samples=2))
        for session in await sessions_that(client, SessionStatus.RUNNING, "t.0", "t.1"):
            if session.node == "local-1":
                lost = session.id
        first = node_process("local-1")
        first.kill()
        # The other node has no room: only the one that died can run it, once it is back.
        async with asyncio.timeout(SECONDS):
            while (
                again := await client.session(lost)
            ).attempt < 2 or again.status is not SessionStatus.RUNNING:
                continue
        assert again.node == "local-1"
        assert node_process("local-1").pid != first.pid
        (tmp_path / "gate").touch()
        assert [result.reward for result in await client.wait(["t"], timeout=SECONDS)] == [1.0, 1.0]


async def test_one_that_cannot_start_ends_the_system_and_says_so(tmp_path: Path, wire: VllmWire) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = two_nodes(tmp_path, wire, gateway={"port": taken.getsockname()[1]})
        with pytest.raises(Unavailable, match=r"node local-[12] failed to start \(exit code 1\)"):
            async with running(settings, lambda _step: None):
                pass
    assert not [child for child in psutil.Process().children() if "polar" in child.cmdline()]


async def test_they_join_a_server_with_a_certificate_of_any_name(tmp_path: Path, wire: VllmWire) -> None:
    certificate, cert, key = trustme.CA().issue_cert("trainer.example"), tmp_path / "cert", tmp_path / "key"
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    settings = two_nodes(tmp_path, wire, server={"port": 0, "tls": {"cert": cert, "key": key}})
    async with (
        running(settings, lambda _step: None) as stack,
        AsyncClient(stack.url, stack.token, ca=pinned(cert)) as client,
    ):
        async with asyncio.timeout(SECONDS):
            while {node.name for node in await client.nodes()} != {"local-1", "local-2"}:
                continue
