"""A trainer's word on the policy holds once every live node has followed it, and a dead holder's ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polar.client import AsyncClient
from polar.config.settings import ServerSettings
from polar.errors import Conflict, InvalidInput, Unavailable
from polar.models.policy import Pause, PauseMode, PolicyReport
from polar.models.session import SessionResult
from polar.models.views import ResultPage
from polar.rollout.policy import mark_stale
from polar.rollout.server import RolloutServer
from polar.store.policy import SILENT_SECONDS
from polar.store.store import Store
from tests.fakes.control_plane import Clock, complete, idle_task, result_of
from tests.fakes.scripted_node import ScriptedNode
from tests.unit.rollout.conftest import TOKEN
from tests.waiting import still_waits


@pytest.fixture
async def client(server: RolloutServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, TOKEN) as connected:
        yield connected


@pytest.fixture
async def node(client: AsyncClient) -> ScriptedNode:
    known = ScriptedNode(client, "a")
    await known.report()
    await known.report()
    return known


async def test_a_pause_is_answered_when_the_node_has_paused(client: AsyncClient, node: ScriptedNode) -> None:
    pausing = asyncio.create_task(client.pause_policy("trainer", PauseMode.DRAIN))
    order = await node.report(wait=10)
    assert (order.is_paused, order.mode) == (True, PauseMode.DRAIN)
    assert await still_waits(pausing)
    await node.report()
    view = await asyncio.wait_for(pausing, 30)
    assert (view.is_paused, view.holder, view.is_settled) == (True, "trainer", True)
    assert 50 < (view.seconds_left or 0) <= 60


async def test_an_update_raises_the_version_for_nodes_now_and_later(
    client: AsyncClient, node: ScriptedNode
) -> None:
    updating = asyncio.create_task(client.update_policy("/weights/1"))
    order = await node.follow()
    view = await updating
    assert (order.version, order.path, view.version, view.is_settled) == (1, "/weights/1", 1, True)
    late = await ScriptedNode(client, "late").report()
    assert (late.version, late.path) == (1, "/weights/1")
    # It is alive and has nothing yet.
    assert not (await client.policy()).is_settled


async def test_weights_that_no_node_can_load_leave_the_old_version(
    client: AsyncClient, node: ScriptedNode
) -> None:
    updating = asyncio.create_task(client.update_policy("/weights/1", version=7))
    assert (await node.follow("no such file")).version == 7
    assert (await node.follow()).version == 0
    with pytest.raises(Unavailable, match="version 7 could not be loaded, version 0 stays: a: no such file"):
        await updating
    assert (await client.policy()).version == 0


async def test_a_node_that_fails_alone_is_named_and_the_others_go_on(
    client: AsyncClient, node: ScriptedNode
) -> None:
    other = ScriptedNode(client, "b")
    await other.report()
    updating = asyncio.create_task(client.update_policy("/weights/1"))
    await asyncio.gather(node.follow(), other.follow("disk full"))
    view = await updating
    assert view.version == 1
    assert [(told.node, told.is_settled, told.error) for told in view.nodes] == [
        ("a", True, None),
        ("b", False, "disk full"),
    ]


async def test_nodes_that_left_or_fell_silent_are_not_waited_for(tmp_path: Path) -> None:
    clock = Clock()
    async with (
        Store.open(tmp_path / "data", clock) as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        AsyncClient(server.url, TOKEN) as client,
    ):
        await client.follow_policy("leaves", PolicyReport())
        await client.follow_policy("leaves", PolicyReport(leaves=True))
        await client.follow_policy("dies", PolicyReport())
        late = await client.pause_policy("trainer", wait_seconds=0.1)
        assert [told.node for told in late.nodes] == ["dies"]
        assert not late.is_settled
        clock.now += SILENT_SECONDS + 1
        async with asyncio.timeout(30):
            assert (await client.pause_policy("trainer")).nodes == ()


async def test_a_pause_ends_by_itself_unless_it_is_renewed(store: Store, tmp_path: Path) -> None:
    clock = Clock()
    async with Store.open(tmp_path / "timed", clock) as timed:
        await timed.policy.pause(Pause(holder="trainer", timeout_seconds=10))
        clock.now += 8
        await timed.policy.pause(Pause(holder="trainer", timeout_seconds=10))
        clock.now += 8
        assert (await timed.policy.wanted()).is_paused
        before = (await timed.policy.wanted()).step
        clock.now += 3
        assert not (await timed.policy.order()).is_paused
        assert (await timed.policy.order()).step > before


async def test_a_node_hears_at_once_that_a_pause_is_over(client: AsyncClient, node: ScriptedNode) -> None:
    await client.pause_policy("trainer", timeout_seconds=1.5, wait_seconds=0)
    assert (await node.report(wait=10)).is_paused
    async with asyncio.timeout(30):
        while (await node.report(wait=node.order.seconds_left or 0)).is_paused:
            pass
    assert not (await client.policy()).is_paused


async def test_only_the_holder_goes_on(client: AsyncClient) -> None:
    await client.pause_policy("trainer")
    with pytest.raises(Conflict, match="paused by 'trainer'"):
        await client.pause_policy("another")
    with pytest.raises(Conflict, match="paused by 'trainer'"):
        await client.update_policy("/weights/1")
    with pytest.raises(Conflict, match="paused by 'trainer'"):
        await client.resume_policy("another")
    assert (await client.update_policy("/weights/1", holder="trainer")).is_paused
    assert not (await client.resume_policy("trainer")).is_paused
    assert not (await client.resume_policy()).is_paused


async def test_versions_only_rise(client: AsyncClient) -> None:
    await client.update_policy("/weights/5", version=5)
    with pytest.raises(Conflict, match="version 5 was asked for already"):
        await client.update_policy("/weights/5", version=5)
    assert (await client.update_policy(None)).version == 6


async def test_weights_that_no_node_can_load_are_given_up_without_whoever_asked(
    client: AsyncClient, node: ScriptedNode
) -> None:
    updating = asyncio.create_task(client.update_policy("/weights/1"))
    assert (await node.report(wait=10)).version == 1
    updating.cancel()
    await asyncio.wait({updating})
    node.error = "no such file"
    assert (await node.report()).version == 0
    view = await client.policy()
    assert (view.version, view.newest, view.failure) == (0, 1, "a: no such file")


async def test_a_number_that_failed_is_never_given_to_other_weights(
    client: AsyncClient, node: ScriptedNode
) -> None:
    """An engine that nobody could reach meanwhile may have the failed ones under it."""
    await client.update_policy("/weights/1", wait_seconds=0)
    await node.follow("no such file")
    await node.follow()
    assert (await client.update_policy("/weights/2", wait_seconds=0)).version == 2


async def test_what_nodes_go_back_to_is_told_until_one_has_the_new_weights(
    client: AsyncClient, node: ScriptedNode
) -> None:
    for name, version in (("/weights/1", 1), ("/weights/2", 2)):
        await client.update_policy(name, wait_seconds=0)
        fallback = (await client.policy()).fallback
        assert fallback is not None
        assert fallback.version == 0, f"{version}: nobody has loaded anything yet"
    await node.follow()
    assert (await client.policy()).fallback is None
    await client.update_policy("/weights/3", wait_seconds=0)
    fallback = (await client.policy()).fallback
    assert fallback is not None
    assert (fallback.version, fallback.path) == (2, "/weights/2")


@pytest.mark.parametrize("fields", [{"timeout_seconds": 0}, {"timeout_seconds": 1e9}, {"wait_seconds": -1}])
async def test_a_pause_without_an_end_is_refused(client: AsyncClient, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(fields))):
        await client.pause_policy("trainer", **fields)


async def test_a_block_holds_its_pause_and_ends_it(client: AsyncClient) -> None:
    async with client.paused(timeout_seconds=1) as pause:
        before, after = await client.policy(), await client.policy()
        while (after.seconds_left or 0) <= (before.seconds_left or 0):
            assert after.holder == pause.holder, "it is renewed before it ends"
            before, after = after, await client.policy()
        assert (await pause.update("/weights/1")).version == 1
    assert not (await client.policy()).is_paused
    with pytest.raises(ZeroDivisionError):
        async with client.paused():
            raise ZeroDivisionError
    assert not (await client.policy()).is_paused


async def test_orders_survive_the_server(store: Store) -> None:
    server = RolloutServer(store, TOKEN, ServerSettings(port=0))
    async with server, AsyncClient(server.url, TOKEN) as client:
        await client.update_policy("/weights/4", version=4)
        await client.pause_policy("trainer")
    server = RolloutServer(store, TOKEN, ServerSettings(port=0))
    async with server, AsyncClient(server.url, TOKEN) as client:
        view = await client.policy()
    assert (view.version, view.path, view.holder) == (4, "/weights/4", "trainer")


def page(*versions: int | None) -> ResultPage:
    results = tuple(
        SessionResult(
            session_id=f"s{at}",
            task_id="t",
            sample=at,
            attempt=1,
            status="completed",
            policy_version_min=version,
        )
        for at, version in enumerate(versions)
    )
    return ResultPage(results=results, cursor=9, end=9)


def test_results_of_too_old_a_policy_are_named_and_the_fresh_ones_told_apart() -> None:
    made = mark_stale(page(7, 5, None, 4), 7, 2)
    assert (made.policy_version, made.stale, made.cursor) == (7, ("s3",), 9)
    assert [result.session_id for result in made.fresh] == ["s0", "s1", "s2"]
    assert mark_stale(page(0), 7, None).stale == ()


async def test_the_feed_tells_what_is_stale(client: AsyncClient, store: Store, server: RolloutServer) -> None:
    await client.submit(idle_task(samples=2))
    for lease in await store.leases.claim("a", limit=2, runtimes=["idle"], seconds=60):
        result = result_of(lease, policy_version_min=3 * lease.sample, policy_version_max=3)
        await complete(store, lease.key, result)
    await client.update_policy(None, version=4)
    (found,) = [page async for page in client.result_pages(["task"], max_staleness=2) if page.results]
    assert (len(found.results), found.stale, found.policy_version) == (2, ("task.0",), 4)
    fresh = [result.session_id async for result in client.results(["task"], max_staleness=2)]
    assert fresh == ["task.1"]
