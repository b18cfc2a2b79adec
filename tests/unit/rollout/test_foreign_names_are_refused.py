"""A browser that is led to the server under a foreign name (DNS rebinding) reads nothing."""

from __future__ import annotations

import httpx
import pytest

from polar.config.settings import ServerSettings
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.unit.rollout.conftest import TOKEN

PATHS = ["/metrics", "/", "/api/v1/health", "/api/v1/tasks"]


async def answers(server: RolloutServer, host: str, **headers: str) -> dict[str, int]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as http:
        return {path: (await http.get(path, headers={"Host": host, **headers})).status_code for path in PATHS}


@pytest.mark.parametrize("headers", [{}, {"Authorization": f"Bearer {TOKEN}"}])
async def test_a_foreign_name_reads_nothing(server: RolloutServer, headers: dict[str, str]) -> None:
    assert set((await answers(server, "evil.example:8700", **headers)).values()) == {421}


async def test_the_refusal_names_the_setting(http: httpx.AsyncClient) -> None:
    answer = await http.get("/health", headers={"Host": "evil.example"})
    assert "'evil.example'" in answer.text
    assert "server.hosts" in answer.text


@pytest.mark.parametrize("host", ["localhost:8700", "127.0.0.1", "[::1]:1"])
async def test_this_machine_is_answered(server: RolloutServer, host: str) -> None:
    assert (await answers(server, host))["/metrics"] == 200


async def test_a_name_that_the_owner_lists_is_answered(store: Store) -> None:
    async with RolloutServer(store, TOKEN, ServerSettings(port=0, hosts=("polar.example",))) as server:
        found = await answers(server, "polar.example")
        assert (found["/"], found["/api/v1/tasks"], found["/metrics"]) == (200, 401, 401)
        assert set((await answers(server, "evil.example")).values()) == {421}


async def test_a_server_for_others_has_names_but_none_that_reads_without_a_token(store: Store) -> None:
    async with RolloutServer(store, TOKEN, ServerSettings(host="0.0.0.0", port=0, insecure=True)) as server:
        found = await answers(server, "trainer:8700")
        assert (found["/api/v1/health"], found["/metrics"]) == (200, 401)
