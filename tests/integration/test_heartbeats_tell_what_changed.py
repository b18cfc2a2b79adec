"""A change of one session is told at once and alone, however many others the node holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from polar.client import AsyncClient
from polar.models.session import SessionStatus
from polar.models.views import Heartbeat, HeartbeatAnswer
from polar.node import node
from tests.systems import shell_task, system

SESSIONS = 6


async def test_one_session_s_change_does_not_tell_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: asyncio.Queue[dict[str, SessionStatus]] = asyncio.Queue()
    send = AsyncClient.heartbeat

    async def heartbeat(client: AsyncClient, node: str, beat: Heartbeat) -> HeartbeatAnswer:
        answer = await send(client, node, beat)
        told.put_nowait({session.session_id: session.status for session in beat.sessions})
        return answer

    monkeypatch.setattr(AsyncClient, "heartbeat", heartbeat)
    # The whole is told only once a third of the lease is over, which this test does not wait for.
    monkeypatch.setattr(node, "BEAT_SECONDS", 600.0)
    gate = tmp_path / "gate"
    waiting = f"[ $POLAR_INSTRUCTION != 0 ] && exec sleep 600; until [ -e {gate} ]; do sleep 0.05; done"
    async with system(tmp_path / "data", ["Never asked."]) as running:
        for number in range(SESSIONS):
            await running.client.submit(shell_task(f"t{number}", waiting, instruction=str(number)))
        async with running.node(run_slots=SESSIONS, init_workers=SESSIONS), asyncio.timeout(60):
            known: dict[str, SessionStatus] = {}
            while [*known.values()] != [SessionStatus.RUNNING] * SESSIONS:
                known |= await told.get()
            gate.touch()
            await running.client.wait(["t0"], timeout=30)
            later = [told.get_nowait() for _ in range(told.qsize())]
    assert {*map(tuple, later)} == {("t0.0",)}, later
