"""The control plane has nothing to upgrade to: a request that asks for it is answered like any other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.store.store import Store


async def test_a_request_for_an_upgrade_is_answered(tmp_path: Path) -> None:
    async with (
        Store.open(tmp_path) as store,
        RolloutServer(store, "t" * 20, ServerSettings(port=0)) as server,
    ):
        at = urlsplit(server.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        asked = b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\nContent-Length: 2\r\n\r\n{}"
        writer.write(b"POST /api/v1/nodes/n/join HTTP/1.1\r\nHost: localhost\r\n" + asked)
        answer = await asyncio.wait_for(reader.readline(), 30)
        writer.close()
    assert answer.split()[1] == b"401"
