"""A fleet's nodes bring a token of their own role, made with the one that the fleet was started with."""

from __future__ import annotations

import asyncio
from pathlib import Path

from polar.app.fleet.control import with_node_token
from polar.app.fleet.planning import FleetOrder
from polar.client import AsyncClient
from polar.config.settings import ServerSettings, Settings
from polar.models.access import NewToken, TokenRole
from polar.models.views import Join
from polar.rollout.server import RolloutServer
from polar.store.store import Store

OWNER = "a-token-for-this-test"


async def test_an_admins_order_gets_a_token_that_opens_no_more_than_nodes_need(tmp_path: Path) -> None:
    async with (
        Store.open(tmp_path) as store,
        RolloutServer(store, OWNER, ServerSettings(port=0)) as server,
    ):
        order = await asyncio.to_thread(with_node_token, FleetOrder.of(Settings(), server.url, OWNER))
        token = order.node_settings("n1")["server"]["token"]
        assert token != OWNER
        assert token not in repr(order)
        (view,) = await store.tokens.all()
        assert (view.role, view.name.startswith("fleet-")) == (TokenRole.NODE, True)
        async with AsyncClient(server.url, token) as client:
            assert (await client.join("n1", Join(version="0"))).lease_seconds == 30.0


async def test_an_order_that_may_make_none_gives_nodes_what_it_has(tmp_path: Path) -> None:
    async with (
        Store.open(tmp_path) as store,
        RolloutServer(store, OWNER, ServerSettings(port=0)) as server,
    ):
        made = await store.tokens.create(NewToken(name="nodes", role=TokenRole.NODE))
        order = await asyncio.to_thread(with_node_token, FleetOrder.of(Settings(), server.url, made.token))
        assert order.node_settings("n1")["server"]["token"] == made.token
        assert len(await store.tokens.all()) == 1
