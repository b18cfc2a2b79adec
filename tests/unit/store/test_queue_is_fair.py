"""Tasks of one priority take turns, groups stay together, and enough samples are enough."""

from __future__ import annotations

from polar.models.session import FailureReason, Lease, SessionStatus, StageEntry, TrajectoryStats
from polar.models.views import SessionBeat, SessionFilter
from polar.store.delivery import Retries
from polar.store.store import Store
from polar.store.tasks import SAMPLES_PER_TURN
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

USABLE = TrajectoryStats(sampled_tokens=3, trainable_tokens=3)


async def claim(store: Store, limit: int) -> list[Lease]:
    return list(await store.leases.claim("node", limit=limit, runtimes=["idle"], seconds=10))


async def statuses(store: Store, task_id: str) -> list[SessionStatus]:
    page = await store.sessions.page(SessionFilter(task_id=task_id), limit=1000)
    return [session.status for session in page.sessions]


async def test_a_large_task_lets_a_later_one_in_after_each_turn(store: Store) -> None:
    await store.tasks.submit(idle_task("large", samples=3 * SAMPLES_PER_TURN))
    await store.tasks.submit(idle_task("small", samples=2))
    order = [lease.task.id for lease in await claim(store, SAMPLES_PER_TURN + 3)]
    assert order == ["large"] * SAMPLES_PER_TURN + ["small"] * 2 + ["large"]


async def test_new_tasks_cannot_hold_up_the_rest_of_a_large_one(store: Store) -> None:
    await store.tasks.submit(idle_task("large", samples=2 * SAMPLES_PER_TURN))
    await claim(store, SAMPLES_PER_TURN)
    await store.tasks.submit(idle_task("late", samples=1))
    order = [lease.task.id for lease in await claim(store, SAMPLES_PER_TURN + 1)]
    assert order == ["large"] * SAMPLES_PER_TURN + ["late"]


async def test_tasks_that_a_node_avoids_are_leased_where_no_others_wait(store: Store) -> None:
    for id in ("bad", "worse", "sound"):
        await store.tasks.submit(idle_task(id))
    order = []
    for _ in range(4):
        (lease,) = await store.leases.claim(
            "node", limit=1, runtimes=["idle"], seconds=10, avoid=["bad", "worse"]
        ) or (None,)
        order.append(lease and lease.task.id)
    assert order == ["sound", "bad", "worse", None]


async def test_a_group_runs_in_one_piece(store: Store) -> None:
    for id in ("a", "b", "c"):
        await store.tasks.submit(idle_task(id, samples=16))
    order = [lease.task.id for lease in await claim(store, 48)]
    assert order == ["a"] * 16 + ["b"] * 16 + ["c"] * 16


async def test_enough_usable_samples_cancel_the_rest_of_their_group_only(store: Store) -> None:
    await store.tasks.submit(idle_task("group", samples=6, early_stop=2))
    await store.tasks.submit(idle_task("other", samples=1))
    first, empty, second, held = await claim(store, 4)
    assert await complete(store, empty.key, result_of(empty))
    for lease in (first, second):
        assert await complete(store, lease.key, result_of(lease, stats=USABLE))
    completed, cancelled = SessionStatus.COMPLETED, SessionStatus.CANCELLED
    assert await statuses(store, "group") == [completed] * 3 + [SessionStatus.INIT] + [cancelled] * 2
    assert await statuses(store, "other") == [SessionStatus.QUEUED]
    beat = SessionBeat(session_id=held.session_id, key=held.key, status=SessionStatus.INIT)
    answer = await store.leases.heartbeat("node", [beat], seconds=10)
    assert answer.cancel == (held.session_id,)
    last = (await store.sessions.get("group.5")).result
    assert last is not None
    assert last.error == "early_stop: 2 samples are enough"


async def test_every_change_of_status_is_an_event_with_its_time(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store, 1)
    clock.now += 5
    beat = SessionBeat(
        session_id=lease.session_id,
        key=lease.key,
        status=SessionStatus.RUNNING,
        entered=(
            StageEntry(status=SessionStatus.READY, seconds_ago=2),
            StageEntry(status=SessionStatus.RUNNING, seconds_ago=0.5),
        ),
    )
    await store.leases.heartbeat("node", [beat], seconds=10)
    # The same again, as when its answer was lost on the way.
    await store.leases.heartbeat("node", [beat], seconds=10)
    clock.now += 1
    await complete(store, lease.key, result_of(lease))
    events = await store.events.of(lease.session_id)
    start = clock.now - 6
    assert [(event.status.value, event.at - start) for event in events] == [
        ("init", 0),
        ("ready", 3),
        ("running", 4.5),
        ("completed", 6),
    ]
    assert (await store.events.after(events[1].seq)).events == events[2:]


async def test_a_passing_failure_is_tried_again_until_the_last_attempt(store: Store) -> None:
    await store.tasks.submit(idle_task())
    for attempt in (1, 2):
        (lease,) = await claim(store, 1)
        assert lease.attempt == attempt
        failed = result_of(
            lease,
            status=SessionStatus.FAILED,
            failure=FailureReason.INFRASTRUCTURE,
            error="no image yet",
        )
        assert await complete(store, lease.key, failed, retries=Retries(2, 0.0))
        assert not await complete(store, lease.key, failed, retries=Retries(2, 0.0))
    view = await store.sessions.get("task.0")
    assert view.status is SessionStatus.FAILED
    assert view.result == failed
    details = [event.detail for event in await store.events.of("task.0") if event.detail]
    assert details == ["no image yet"] * 2


async def test_a_failed_session_waits_longer_before_each_further_attempt(store: Store, clock: Clock) -> None:
    await store.tasks.submit(idle_task())
    retries = Retries(max_attempts=4, seconds=10.0)
    for pause in (10.0, 20.0, 40.0):
        (lease,) = await claim(store, 1)
        failed = result_of(lease, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE)
        await complete(store, lease.key, failed, retries=retries)
        clock.now += pause - 1.0
        assert not await claim(store, 1)
        clock.now += 1.0
    assert len(await claim(store, 1)) == 1


async def test_a_failure_of_the_task_s_own_is_final(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store, 1)
    failed = result_of(lease, status=SessionStatus.FAILED, failure=FailureReason.TASK, error="no such image")
    await complete(store, lease.key, failed, retries=Retries(3, 0.0))
    assert (await store.sessions.get("task.0")).result == failed


async def test_a_cancelled_session_is_not_run_again(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await claim(store, 1)
    await store.sessions.cancel("task.0")
    failed = result_of(lease, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE)
    assert await complete(store, lease.key, failed)
    assert not await complete(store, lease.key, failed)
    assert (await store.sessions.get("task.0")).status is SessionStatus.CANCELLED
