"""Webhooks in the store: each target gets everything that ended once, from one server at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from polar.models.session import SessionStatus
from polar.models.task import Webhook, WebhookEvent
from polar.models.views import Notice
from polar.store.store import Store
from polar.store.webhooks import Target
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

URL = "https://hooks.example/polar"
BOTH = (WebhookEvent.SESSION_ENDED, WebhookEvent.TASK_ENDED)


async def run(store: Store, task_id: str, samples: int, webhook: Webhook | None) -> None:
    await store.tasks.submit(idle_task(task_id, samples=samples, webhook=webhook))
    leases = await store.leases.claim("north", limit=samples, runtimes=["idle"], seconds=60)
    for lease in leases:
        await complete(store, lease.key, result_of(lease))


async def claimed(store: Store, seconds: float = 60) -> Target:
    """The one target there is."""
    target = await store.webhooks.claim(seconds=seconds)
    assert target is not None
    return target


async def unread(store: Store, limit: int = 100) -> list[Notice]:
    """Deliver everything."""
    notices: list[Notice] = []
    while (target := await store.webhooks.claim(seconds=60)) is not None:
        batch = await store.webhooks.read(target, limit=limit)
        await store.webhooks.settle(target, batch.cursor)
        notices += [notice for _, notice in batch.notices]
    return notices


def about(notices: list[Notice]) -> list[tuple[WebhookEvent, str]]:
    return [(notice.event, notice.session_id or notice.task_id) for notice in notices]


@pytest.mark.parametrize("limit", [1, 100])
async def test_each_ended_session_and_task_is_delivered_once_and_in_order(store: Store, limit: int) -> None:
    await run(store, "silent", 2, None)
    await run(store, "loud", 2, Webhook(url=URL, events=BOTH))
    await run(store, "short", 1, Webhook(url=URL, events=(WebhookEvent.TASK_ENDED,)))
    await store.tasks.submit(idle_task("waiting", webhook=Webhook(url=URL, events=BOTH)))
    await store.tasks.submit(idle_task("stopped", webhook=Webhook(url=URL, events=BOTH)))
    await store.tasks.cancel("stopped")
    assert about(await unread(store, limit)) == [
        (WebhookEvent.SESSION_ENDED, "loud.0"),
        (WebhookEvent.SESSION_ENDED, "loud.1"),
        (WebhookEvent.TASK_ENDED, "loud"),
        (WebhookEvent.TASK_ENDED, "short"),
        (WebhookEvent.SESSION_ENDED, "stopped.0"),
        (WebhookEvent.TASK_ENDED, "stopped"),
    ]
    await store.tasks.cancel("waiting")
    assert about(await unread(store)) == [
        (WebhookEvent.SESSION_ENDED, "waiting.0"),
        (WebhookEvent.TASK_ENDED, "waiting"),
    ]


async def test_a_notice_is_the_same_whenever_it_is_read(store: Store) -> None:
    await run(store, "t", 2, Webhook(url=URL, events=BOTH))
    target = await claimed(store)
    first = await store.webhooks.read(target, limit=10)
    await run(store, "other", 1, None)
    again = await store.webhooks.read(target, limit=10)
    assert first.notices == again.notices
    assert len({notice.id for _, notice in first.notices}) == 3


async def test_notices_carry_the_result_or_the_whole_task(store: Store) -> None:
    await run(store, "t", 2, Webhook(url=URL, events=BOTH))
    notices = {notice.event: notice for notice in await unread(store)}
    ended = notices[WebhookEvent.SESSION_ENDED]
    assert ended.result is not None
    assert ended.result.session_id == ended.session_id
    task = notices[WebhookEvent.TASK_ENDED].task
    assert task is not None
    assert task.sessions == {SessionStatus.COMPLETED: 2}
    assert task.mean_reward is not None


async def test_a_target_is_claimed_by_one_server_until_that_is_taken_for_dead(
    store: Store, clock: Clock
) -> None:
    await run(store, "t", 1, Webhook(url=URL))
    claims = await asyncio.gather(*(store.webhooks.claim(seconds=60) for _ in range(3)))
    (first,) = [target for target in claims if target is not None]
    clock.now += 60
    assert await claimed(store) is not None
    await store.webhooks.settle(first, first.cursor + 1)
    (view,) = await store.webhooks.all()
    assert view.lag == 1, "what the server that was taken for dead says of its claim is too late"


async def test_a_failure_waits_and_keeps_its_place(store: Store, clock: Clock) -> None:
    await run(store, "t", 3, Webhook(url=URL))
    target = await claimed(store)
    batch = await store.webhooks.read(target, limit=10)
    cursor = batch.notices[1][0] - 1
    await store.webhooks.settle(target, cursor, failures=1, error="it answered 500", retry_seconds=5)
    assert await store.webhooks.claim(seconds=60) is None
    clock.now += 3
    (view,) = await store.webhooks.all()
    assert (view.lag, view.lag_seconds, view.failures, view.error) == (2, 3.0, 1, "it answered 500")
    assert view.retry_at == clock.now + 2
    clock.now += 2
    target = await claimed(store)
    assert target.failures == 1
    await store.webhooks.settle(target, target.cursor, failures=2, error="it answered 500")
    assert [name for _, name in about(await unread(store))] == ["t.1", "t.2"]
    (view,) = await store.webhooks.all()
    assert (view.lag, view.failures, view.error, view.delivered_at) == (0, 0, None, clock.now)


@pytest.mark.parametrize("seconds", [3600, 600, 10])
async def test_a_target_served_before_the_clock_was_set_back_is_served_on(
    store: Store, clock: Clock, seconds: int
) -> None:
    await run(store, "a", 1, Webhook(url=URL))
    await unread(store)
    clock.now -= seconds
    await run(store, "b", 1, Webhook(url=URL))
    assert [name for _, name in about(await unread(store))] == ["b.0"]


async def test_only_targets_with_something_new_are_found(store: Store) -> None:
    await run(store, "a", 1, Webhook(url=URL))
    await unread(store)
    await run(store, "b", 1, Webhook(url=f"{URL}/b"))
    await run(store, "c", 1, None)
    assert (await claimed(store)).url == f"{URL}/b"
    assert await store.webhooks.claim(seconds=60) is None


async def test_an_idle_target_costs_the_same_however_many_results_of_others_came(tmp_path: Path) -> None:
    steps = 0

    def count_steps(connection: sqlite3.Connection, _record: object) -> None:
        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        connection.set_progress_handler(step, 5)

    event.listen(Engine, "connect", count_steps)
    try:
        async with Store.open(tmp_path) as store:
            await run(store, "t", 1, Webhook(url=URL))
            await unread(store)
            costs = []
            for round in range(3):
                await run(store, f"silent-{round}", 40, None)
                steps = 0
                assert await store.webhooks.claim(seconds=60) is None
                costs.append(steps)
    finally:
        event.remove(Engine, "connect", count_steps)
    assert 0 < costs[-1] <= costs[0] + 10
