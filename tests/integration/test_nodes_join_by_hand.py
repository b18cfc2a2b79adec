"""`polar node` as a user runs it: joins a server elsewhere, drains on a signal, says why it cannot."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from polar.app.stack import serving
from polar.client import AsyncClient
from polar.config.settings import ServerSettings, Settings
from polar.errors import Conflict
from polar.models.session import SessionStatus
from polar.models.views import Join, SessionView
from tests.fakes.character_chat import Said
from tests.fakes.vllm_wire import vllm_wire
from tests.systems import ASK, TOKEN, allow_processes, shell_task
from tests.waiting import eventually

SECONDS = 60.0

pytestmark = pytest.mark.timeout(120)


@dataclass
class Place:
    """A server without a node, and an engine."""

    server: str
    engine: str
    client: AsyncClient
    directory: Path

    @asynccontextmanager
    async def node(
        self, *options: str, server: str | None = None, token: str = TOKEN
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        arguments = {"--server": server or self.server, "--engine-url": self.engine, "--engine-mode": "chat"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "polar", "node"),
            *(part for option in arguments.items() for part in option),
            *("--data-dir", str(self.directory / "node"), *options),
            *("--config", str(allow_processes(self.directory))),
            cwd=self.directory,
            env={**os.environ, "POLAR_TOKEN": token},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def until_running(self, session_id: str) -> None:
        async def is_running() -> bool:
            return (await self.client.session(session_id)).status is SessionStatus.RUNNING

        await eventually(is_running, SECONDS)

    async def sessions(self, task_id: str) -> list[SessionView]:
        return [session async for session in self.client.sessions(task_id)]

    async def two_run(self, task_id: str) -> bool:
        return [it.status for it in await self.sessions(task_id)].count(SessionStatus.RUNNING) == 2


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    settings = Settings(data_dir=tmp_path / "server", server=ServerSettings(port=0, token=TOKEN))
    async with (
        vllm_wire(Said("Hello.")) as engine,
        serving(settings, lambda _step: None) as server,
        AsyncClient(server.url, TOKEN) as client,
    ):
        yield Place(server.url, engine.url, client, tmp_path)


async def until_said(stream: asyncio.StreamReader | None, words: str) -> str:
    assert stream is not None
    async with asyncio.timeout(SECONDS):
        async for line in stream:
            if words in line.decode():
                return line.decode()
    raise AssertionError(f"never said {words!r}")


async def failure(process: asyncio.subprocess.Process) -> str:
    async with asyncio.timeout(SECONDS):
        _, errors = await process.communicate()
    assert process.returncode == 1
    (line,) = errors.decode().strip().splitlines()
    return line


async def test_a_drained_node_ends_its_agents_and_gives_back_what_had_not_begun(place: Place) -> None:
    gate = place.directory / "gate"
    waiting = f"until [ -e {gate} ]; do sleep 0.1; done\n" + ASK
    async with place.node("--name", "n1", "--run-slots", "1") as process:
        await until_said(process.stdout, "ready as n1")
        await place.client.submit(shell_task("t", waiting, samples=2))
        await place.until_running("t.0")
        process.send_signal(signal.SIGTERM)
        await until_said(process.stderr, "press Ctrl-C again to stop at once")
        gate.touch()
        assert await asyncio.wait_for(process.wait(), SECONDS) == 128 + signal.SIGTERM
    first, second = [await place.client.session(id) for id in ("t.0", "t.1")]
    assert (first.status, first.attempt, first.node) == (SessionStatus.COMPLETED, 1, "n1")
    assert first.result is not None
    assert first.result.reward == 1.0
    assert second.status is SessionStatus.QUEUED


async def test_several_nodes_of_a_command_are_drained_together(place: Place) -> None:
    gate = place.directory / "gate"
    waiting = f"until [ -e {gate} ]; do sleep 0.1; done\n" + ASK
    async with place.node("--name", "n", "--run-slots", "1", "--nodes", "2") as process:
        await until_said(process.stdout, "ready as n with")
        # One that runs and one that is prepared on each node, whichever asks for work first.
        await place.client.submit(shell_task("t", waiting, samples=4))
        await eventually(lambda: place.two_run("t"), SECONDS)
        process.send_signal(signal.SIGTERM)
        await until_said(process.stderr, "press Ctrl-C again to stop at once")
        gate.touch()
        assert await asyncio.wait_for(process.wait(), SECONDS) == 128 + signal.SIGTERM
    sessions = await place.sessions("t")
    ended = [session for session in sessions if session.status is SessionStatus.COMPLETED]
    assert {session.node for session in ended} == {"n-1", "n-2"}
    assert [session.status for session in sessions if session not in ended] == [SessionStatus.QUEUED] * 2


async def test_an_agent_that_outlives_the_grace_is_given_back_uncounted(place: Place) -> None:
    async with place.node("--drain-seconds", "0.2") as process:
        await until_said(process.stdout, "ready as ")
        await place.client.submit(shell_task("t", "sleep 600"))
        await place.until_running("t.0")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), SECONDS) == 128 + signal.SIGTERM
    session = await place.client.session("t.0")
    assert (session.status, session.attempt) == (SessionStatus.QUEUED, 0)


async def test_a_second_signal_ends_it_at_once(place: Place) -> None:
    async with place.node("--drain-seconds", "600") as process:
        await until_said(process.stdout, "ready as ")
        await place.client.submit(shell_task("t", "sleep 600"))
        await place.until_running("t.0")
        process.send_signal(signal.SIGTERM)
        await until_said(process.stderr, "press Ctrl-C again to stop at once")
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 128 + signal.SIGINT


async def test_a_wrong_token_is_one_line_before_anything_is_started(place: Place) -> None:
    async with place.node(token="x" * 20) as process:
        assert "the server refused the token" in await failure(process)
    assert not (place.directory / "node").exists()


async def test_an_absent_server_is_waited_for_and_said(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with place.node(server=f"http://127.0.0.1:{port}") as process:
        said = await until_said(process.stderr, "could not join, trying again")
        assert f"http://127.0.0.1:{port} cannot be reached" in said
        late = Settings(data_dir=place.directory / "late", server=ServerSettings(port=port, token=TOKEN))
        async with serving(late, lambda _step: None):
            await until_said(process.stdout, "ready as ")


async def test_a_node_of_another_protocol_is_refused_with_the_reason(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Conflict, match=r"speaks protocol 999, this server of version \S+ speaks \d"):
        await place.client.join("n", Join(protocol=999, version="9.9"))
    monkeypatch.setattr("polar.rollout.service.NODE_PROTOCOL", 999)
    async with place.node("--name", "n1") as process:
        said = await failure(process)
    assert "node n1 of version" in said
    assert "install the same version of Polar on both" in said


async def test_two_nodes_of_one_name_do_not_share_a_directory(place: Place) -> None:
    async with place.node("--name", "n1") as first:
        await until_said(first.stdout, "ready as n1")
        await place.client.submit(shell_task("t", "true", evaluator="session_completed"))
        await place.client.wait(["t"], timeout=SECONDS)
        async with place.node("--name", "n1") as second:
            assert "a node called n1 is running here already" in await failure(second)


async def test_a_server_without_a_node_needs_no_engine(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "polar", "serve", "--no-node", "--port", "0"),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said = await until_said(process.stdout, "serving nodes at")
        url = said.split()[3]
        async with AsyncClient(url, (tmp_path / ".polar/token").read_text()) as client:
            assert (await client.health()).status == "ok"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), SECONDS) == 128 + signal.SIGTERM
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
