"""Requests that only a broken or hostile client sends are answered like others: nothing waits or fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.systems import TOKEN


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RolloutServer]:
    async with Store.open(tmp_path) as store, RolloutServer(store, TOKEN, ServerSettings(port=0)) as server:
        yield server


async def test_a_request_for_an_upgrade_is_answered(server: RolloutServer) -> None:
    at = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    asked = b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nContent-Length: 2\r\n\r\n{}"
    writer.write(b"POST /api/v1/nodes/n/join HTTP/1.1\r\nHost: localhost\r\n" + asked)
    answer = await asyncio.wait_for(reader.readline(), 30)
    writer.close()
    assert answer.split()[1] == b"401"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("nodes/n/lease", b'{"max_sessions": 1, "runtimes": ["\\ud800"], "wait_seconds": 0}'),
        ("nodes/n/policy", b'{"step": 100000000000000000000, "wait_seconds": 0}'),
        ("sessions/s/release", b'{"fencing_token": 100000000000000000000, "reason": "r"}'),
    ],
)
async def test_what_no_database_stores_is_refused(server: RolloutServer, path: str, body: bytes) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{server.url}/api/v1/{path}", content=body, headers=headers)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["code"] in ("invalid_input", "not_found")
