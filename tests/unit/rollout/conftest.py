"""A live control plane on a free port, whose only extensions are idle ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.extensions import register_idle_extensions

TOKEN = "a token for tests only"


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    register_idle_extensions(monkeypatch)
    async with Store.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture
async def server(store: Store) -> AsyncIterator[RolloutServer]:
    async with RolloutServer(store, TOKEN, ServerSettings(port=0)) as running:
        yield running


@pytest.fixture
async def http(server: RolloutServer) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(
        base_url=f"{server.url}/api/v1", headers=headers, trust_env=False, timeout=30
    ) as client:
        yield client
