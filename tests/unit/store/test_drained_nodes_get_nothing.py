"""A drained node is leased nothing and keeps what it holds, until it is resumed; others take the work."""

from __future__ import annotations

import pytest

from polar.errors import NotFound
from polar.models.policy import PolicyReport
from polar.models.session import SessionStatus
from polar.store.store import Store
from tests.fakes.control_plane import complete, idle_task, result_of

PLACES = {SessionStatus.INIT: 2, SessionStatus.READY: 0, SessionStatus.RUNNING: 4, SessionStatus.POSTRUN: 2}


async def claimed(store: Store, node: str, limit: int = 1) -> int:
    return len(await store.leases.claim(node, limit=limit, runtimes=["idle"], seconds=60))


async def test_a_drained_node_finishes_what_it_holds_and_gets_no_more(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=3))
    await store.nodes.join("north", PLACES)
    (lease,) = await store.leases.claim("north", limit=1, runtimes=["idle"], seconds=60)
    drained = await store.nodes.drain("north")
    assert (drained.is_draining, drained.sessions) == (True, {SessionStatus.INIT: 1})
    assert await claimed(store, "north") == 0
    assert await claimed(store, "south") == 1
    assert await complete(store, lease.key, result_of(lease))
    assert await claimed(store, "north") == 0
    assert not (await store.nodes.resume("north")).is_draining
    assert await claimed(store, "north") == 1


async def test_a_node_stays_drained_when_it_joins_again(store: Store) -> None:
    assert not await store.nodes.join("north", PLACES)
    for _ in range(2):
        await store.nodes.drain("north")
    assert await store.nodes.join("north", PLACES | {SessionStatus.RUNNING: 8})
    await store.policy.report("north", PolicyReport(step=0))
    (north,) = await store.nodes.all()
    assert (north.is_silent, north.is_draining, north.places) == (
        False,
        True,
        PLACES | {SessionStatus.RUNNING: 8},
    )


async def test_only_a_node_that_has_joined_can_be_drained(store: Store) -> None:
    for change in (store.nodes.drain, store.nodes.resume):
        with pytest.raises(NotFound, match="'nowhere'"):
            await change("nowhere")
