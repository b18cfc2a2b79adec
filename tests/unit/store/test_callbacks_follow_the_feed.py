"""Callbacks in the store: one for each thing that ended, claimed by one, never lost and never doubled."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select

from polar.errors import NotFound
from polar.models.callback import Callback, CallbackEvent, CallbackStatus
from polar.models.session import SessionStatus
from polar.rollout.callbacks import LONGEST_BACKOFF_SECONDS, backoff
from polar.store import callbacks as module
from polar.store.callbacks import Callbacks
from polar.store.store import Store
from polar.store.tables import callback_cursor
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

URL = "https://hooks.example/polar"
BOTH = (CallbackEvent.SESSION_ENDED, CallbackEvent.TASK_ENDED)


async def run(store: Store, task_id: str, samples: int, callback: Callback | None) -> None:
    await store.tasks.submit(idle_task(task_id, samples=samples, callback=callback))
    leases = await store.leases.claim("north", limit=samples, runtimes=["idle"], seconds=60)
    for lease in leases:
        await complete(store, lease.key, result_of(lease))


async def followed(store: Store, callbacks: Callbacks | None = None) -> None:
    while await (callbacks or store.callbacks).follow():
        pass


async def told(store: Store) -> list[tuple[CallbackEvent, str]]:
    page = await store.callbacks.page(limit=1000)
    return [(view.event, view.session_id or view.task_id) for view in reversed(page.callbacks)]


async def test_each_ended_session_and_task_is_told_once(store: Store) -> None:
    await run(store, "silent", 2, None)
    await run(store, "loud", 2, Callback(url=URL, events=BOTH))
    await run(store, "short", 1, Callback(url=URL, events=(CallbackEvent.TASK_ENDED,)))
    await store.tasks.submit(idle_task("waiting", callback=Callback(url=URL, events=BOTH)))
    await store.tasks.submit(idle_task("stopped", callback=Callback(url=URL, events=BOTH)))
    await store.tasks.cancel("stopped")
    await followed(store)
    await followed(store)
    assert sorted(await told(store)) == sorted(
        [
            (CallbackEvent.SESSION_ENDED, "loud.0"),
            (CallbackEvent.SESSION_ENDED, "loud.1"),
            (CallbackEvent.TASK_ENDED, "loud"),
            (CallbackEvent.TASK_ENDED, "short"),
            (CallbackEvent.SESSION_ENDED, "stopped.0"),
            (CallbackEvent.TASK_ENDED, "stopped"),
        ]
    )


async def test_a_server_that_starts_anew_goes_on_where_others_were(store: Store) -> None:
    await run(store, "first", 2, Callback(url=URL))
    await followed(store, Callbacks(store.database))
    await run(store, "second", 1, Callback(url=URL))
    await asyncio.gather(*(followed(store, Callbacks(store.database)) for _ in range(3)))
    assert [about for _, about in await told(store)] == ["first.0", "first.1", "second.0"]


async def test_a_long_feed_without_callbacks_is_not_looked_through_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEEP_CURSOR_EVERY", 3)
    await run(store, "silent", 5, None)
    await followed(store)
    seen = await store.database.read(
        lambda connection: connection.execute(select(callback_cursor)).one().results_seq
    )
    assert seen >= 3


async def test_what_is_claimed_is_not_claimed_again_until_its_server_is_taken_for_dead(
    store: Store, clock: Clock
) -> None:
    await run(store, "t", 3, Callback(url=URL))
    await followed(store)
    claims = await asyncio.gather(*(Callbacks(store.database).claim(2, seconds=60) for _ in range(3)))
    first = [claimed for claim in claims for claimed in claim]
    rest = await store.callbacks.claim(10, seconds=60)
    assert sorted(claimed.notice.session_id or "" for claimed in (*first, *rest)) == ["t.0", "t.1", "t.2"]
    assert await store.callbacks.claim(10, seconds=60) == []
    clock.now += 60
    again = await store.callbacks.claim(10, seconds=60)
    assert {claimed.attempt for claimed in again} == {2}
    await store.callbacks.delivered(first[0])
    assert {view.status for view in (await store.callbacks.page()).callbacks} == {CallbackStatus.WAITING}, (
        "what the server that was taken for dead says of an attempt is too late"
    )


async def test_a_failure_waits_then_is_given_up_and_can_begin_anew(store: Store, clock: Clock) -> None:
    await run(store, "t", 1, Callback(url=URL))
    await followed(store)
    (claimed,) = await store.callbacks.claim(1, seconds=60)
    await store.callbacks.failed(claimed, "it answered 500", retry_seconds=5)
    assert await store.callbacks.claim(1, seconds=60) == []
    assert await store.callbacks.next_due() == pytest.approx(5)
    clock.now += 5
    (claimed,) = await store.callbacks.claim(1, seconds=60)
    assert claimed.attempt == 2
    await store.callbacks.failed(claimed, "it answered 500", retry_seconds=None)
    (dead,) = (await store.callbacks.page(status=CallbackStatus.DEAD, task_id="t")).callbacks
    assert (dead.attempts, dead.error) == (2, "it answered 500")
    assert await store.callbacks.next_due() is None
    view = await store.callbacks.retry(dead.id)
    assert (view.status, view.attempts) == (CallbackStatus.WAITING, 0)
    (claimed,) = await store.callbacks.claim(1, seconds=60)
    await store.callbacks.delivered(claimed)
    delivered = await store.callbacks.retry(dead.id)
    assert delivered.status is CallbackStatus.DELIVERED
    with pytest.raises(NotFound):
        await store.callbacks.retry("none")


async def test_notices_carry_the_result_or_the_whole_task(store: Store) -> None:
    await run(store, "t", 2, Callback(url=URL, events=BOTH))
    await followed(store)
    notices = {claimed.notice.event: claimed.notice for claimed in await store.callbacks.claim(9, seconds=60)}
    ended = notices[CallbackEvent.SESSION_ENDED]
    assert ended.result is not None
    assert ended.result.session_id == ended.session_id
    task = notices[CallbackEvent.TASK_ENDED].task
    assert task is not None
    assert task.sessions == {SessionStatus.COMPLETED: 2}
    assert task.mean_reward is not None


async def test_waiting_callbacks_survive_the_end_of_the_process(
    tmp_path: Path, clock: Clock, database_url: str | None
) -> None:
    for _ in range(2):
        async with Store.open(tmp_path / "again", clock, database_url=database_url) as store:
            if not await told(store):
                await run(store, "t", 1, Callback(url=URL))
                await followed(store)
            else:
                (claimed,) = await store.callbacks.claim(1, seconds=60)
                assert claimed.notice.session_id == "t.0"


@given(st.integers(1, 200), st.floats(0.01, 600))
def test_back_off_grows_with_jitter_and_has_an_end(attempt: int, first: float) -> None:
    wait = backoff(attempt, first)
    whole = min(first * 2.0 ** min(attempt - 1, 30), LONGEST_BACKOFF_SECONDS)
    assert whole / 2 <= wait <= whole <= LONGEST_BACKOFF_SECONDS
