"""Sessions that begin with another's recorded answers join its group once, and the task ends with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from polar.errors import Conflict, InvalidInput, NotFound
from polar.models.delivery import Delivery
from polar.models.session import FailureReason, Lease, Origin, ReplayReport, SessionStatus, TrajectoryStats
from polar.models.task import BudgetScope, OnDivergence, TaskStatus, Webhook, WebhookEvent
from polar.models.views import SessionFilter, SessionView
from polar.store.backup import back_up, restore
from polar.store.delivery import Retries, complete_rows
from polar.store.postgres import parsed
from polar.store.retention import Retention, sweep
from polar.store.sessions import MOST_SESSIONS
from polar.store.store import Store
from polar.store.tasks import SAMPLES_PER_TURN
from tests.databases import fresh_postgres
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

STATS = TrajectoryStats(completions=8, sampled_tokens=30, trainable_tokens=30)
DAY = 86_400.0
QUEUED, COMPLETED, CANCELLED = SessionStatus.QUEUED, SessionStatus.COMPLETED, SessionStatus.CANCELLED


async def claim(store: Store, limit: int = 1) -> list[Lease]:
    return list(await store.leases.claim("node", limit=limit, runtimes=["idle"], seconds=10))


async def end(store: Store, lease: Lease, *branch_at: int, **changes: Any) -> bool:
    """Complete a session as a node does, with the points that the task's strategy chose."""
    told: dict[str, Any] = {"stats": STATS, "has_recording": True, "branch_at": branch_at, **changes}
    recording = b"recorded" if told["has_recording"] else None
    return await complete(store, lease.key, result_of(lease, **told), recording=recording)


async def ended_sample(store: Store, id: str = "task", **changes: Any) -> SessionView:
    """A task of one sample, which has ended with a recording."""
    await store.tasks.submit(idle_task(id, **changes))
    (lease,) = await claim(store)
    await end(store, lease)
    return await store.sessions.get(lease.session_id)


async def origins(store: Store, task_id: str = "task") -> list[tuple[str, int | None, int] | None]:
    page = await store.sessions.page(SessionFilter(task_id=task_id), limit=2 * MOST_SESSIONS)
    found = [view.origin for view in page.sessions]
    return [(one.session_id, one.calls, one.depth) if one else None for one in found]


async def statuses(store: Store, task_id: str = "task") -> list[SessionStatus]:
    page = await store.sessions.page(SessionFilter(task_id=task_id), limit=2 * MOST_SESSIONS)
    return [session.status for session in page.sessions]


async def test_branches_are_numbered_on_listed_and_leased_with_their_origin(store: Store) -> None:
    sample = await ended_sample(store)
    origin = Origin(session_id=sample.id, calls=3, on_divergence=OnDivergence.STOP)
    added, is_new = await store.branches.add("task", origin, 2)
    assert is_new
    assert [(view.id, view.sample, view.origin) for view in added] == [
        ("task.1", 1, origin),
        ("task.2", 2, origin),
    ]
    assert [row.origin for row in await store.listing.group("task")] == [None, origin, origin]
    assert [(lease.session_id, lease.origin) for lease in await claim(store, 5)] == [
        ("task.1", origin),
        ("task.2", origin),
    ]


async def test_a_group_says_where_branches_truly_left(store: Store) -> None:
    sample = await ended_sample(store)
    await store.branches.add("task", Origin(session_id=sample.id, calls=2), 3)
    first, second, _ = await claim(store, 3)
    await end(store, first, replay=ReplayReport(origin=sample.id, calls=1, unused_calls=1))
    await end(store, second, replay=ReplayReport(origin=second.session_id, calls=4))
    assert [row.left_at for row in await store.listing.group("task")] == [None, 1, 2, None]


async def test_a_task_with_new_branches_runs_again_until_they_have_ended(store: Store) -> None:
    sample = await ended_sample(store)
    assert (await store.tasks.get("task")).status is TaskStatus.FINISHED
    await store.branches.add("task", Origin(session_id=sample.id, calls=0), 1)
    assert (await store.tasks.get("task")).status is TaskStatus.RUNNING
    (lease,) = await claim(store)
    await end(store, lease)
    assert (await store.tasks.get("task")).status is TaskStatus.FINISHED


async def test_the_same_request_again_adds_nothing(store: Store) -> None:
    sample = await ended_sample(store)
    origin = Origin(session_id=sample.id, calls=3)
    first, _ = await store.branches.add("task", origin, 2, "mine")
    assert await store.branches.add("task", origin, 2, "mine") == (first, False)
    for other in (origin.model_copy(update={"calls": 4}), origin):
        with pytest.raises(Conflict, match="request 'mine' asked for other branches"):
            await store.branches.add("task", other, 3, "mine")
    assert len(await origins(store)) == 3
    assert len((await store.branches.add("task", origin, 2, "another"))[0]) == 2
    assert len((await store.branches.add("task", origin, 1))[0]) == 1
    assert len(await origins(store)) == 6


async def test_requests_at_once_share_no_number(tmp_path: Path, database_url: str | None) -> None:
    async with (
        Store.open(tmp_path, database_url=database_url) as one,
        Store.open(tmp_path, database_url=database_url) as two,
    ):
        sample = await ended_sample(one)
        origin = Origin(session_id=sample.id, calls=1)
        answers = await asyncio.gather(
            *(store.branches.add("task", origin, 3) for store in [one, two] * 5),
            *(store.branches.add("task", origin, 2, "the same") for store in [one, two] * 3),
        )
        ids = [view.id for added, is_new in answers for view in added if is_new]
        assert sorted(ids) == sorted(f"task.{number}" for number in range(1, 33))
        assert sum(is_new for _, is_new in answers) == 11


async def test_a_task_takes_no_more_sessions_than_it_may_have(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=MOST_SESSIONS - 2))
    (lease, *_) = await claim(store)
    await end(store, lease)
    origin = Origin(session_id=lease.session_id, calls=1)
    with pytest.raises(Conflict, match="'task' has 1022 of 1024 sessions: 3 more do not fit"):
        await store.branches.add("task", origin, 3)
    await store.branches.add("task", origin, 2)
    assert (await store.sessions.get("task.1023")).origin == origin


async def test_only_what_is_recorded_can_be_begun_with(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=2))
    first, second = await claim(store, 2)
    with pytest.raises(Conflict, match=r"'task\.0' is init: it has no recording before it has ended"):
        await store.recorded(first.session_id)
    await end(store, first)
    assert (await store.recorded(first.session_id, 8)).id == first.session_id
    with pytest.raises(InvalidInput, match=r"calls: session 'task\.0' has 8 model calls, not 9"):
        await store.recorded(first.session_id, 9)
    await end(store, second, has_recording=False)
    with pytest.raises(Conflict, match=r"'task\.1' completed without a recording"):
        await store.recorded(second.session_id)
    with pytest.raises(NotFound, match="no session 'none'"):
        await store.recorded("none")


async def test_what_a_strategy_chose_becomes_branches_as_deep_as_the_task_says(store: Store) -> None:
    branching = {"at": "idle", "samples": 2, "depth": 2, "budgets": "session"}
    await store.tasks.submit(idle_task(branching=branching))
    (sample,) = await claim(store)
    await end(store, sample, 2, 5)
    of_sample = [("task.0", 2, 1), ("task.0", 2, 1), ("task.0", 5, 1), ("task.0", 5, 1)]
    assert await origins(store) == [None, *of_sample]
    branch, *_ = await claim(store)
    assert branch.origin is not None
    assert branch.origin.budgets is BudgetScope.SESSION
    await end(store, branch, 6)
    of_branch = [("task.1", 6, 2), ("task.1", 6, 2)]
    assert await origins(store) == [None, *of_sample, *of_branch]
    for lease in await claim(store, 9):
        # Those of the sample branch again, those of its branch no more.
        await end(store, lease, 7)
    assert len(await origins(store)) == 7 + 3 * 2
    for lease in await claim(store, 9):
        await end(store, lease, 7)
    assert (await store.tasks.get("task")).status is TaskStatus.FINISHED
    assert len(await origins(store)) == 13


async def test_a_result_that_comes_again_branches_once(store: Store) -> None:
    await store.tasks.submit(idle_task(branching={"at": "idle"}))
    (lease,) = await claim(store)
    assert await end(store, lease, 4)
    assert not await end(store, lease, 4)
    assert len(await origins(store)) == 2


@pytest.mark.parametrize(
    ("branching", "changes"),
    [
        (None, {}),
        ({"at": "idle"}, {"branch_at": ()}),
        ({"at": "idle"}, {"branch_at": (8, 9, -1)}),
        ({"at": "idle"}, {"has_recording": False}),
        ({"at": "idle"}, {"status": SessionStatus.FAILED, "failure": FailureReason.TASK}),
        ({"at": "idle"}, {"status": SessionStatus.CANCELLED}),
    ],
    ids=["no branching", "no point", "past the last call", "no recording", "failed", "cancelled"],
)
async def test_nothing_leaves_a_session_without_a_beginning_to_share(
    store: Store, branching: dict[str, Any] | None, changes: dict[str, Any]
) -> None:
    await store.tasks.submit(idle_task(branching=branching))
    (lease,) = await claim(store)
    await end(store, lease, **{"branch_at": (2,), **changes})
    assert await origins(store) == [None]


async def test_branches_for_which_there_is_no_room_are_told_of(store: Store) -> None:
    await store.tasks.submit(
        idle_task(samples=MOST_SESSIONS - 3, branching={"at": "idle", "samples": 2, "depth": 8})
    )
    first, second = await claim(store, 2)
    await end(store, first, 2, 5)
    await end(store, second, 1)
    assert (await origins(store))[-3:] == [("task.0", 2, 1), ("task.0", 2, 1), ("task.0", 5, 1)]
    details = [(await store.events.of(lease.session_id))[-1].detail for lease in (first, second)]
    assert details == [
        "1 of 4 branches were left out: a task has at most 1024 sessions",
        "2 of 2 branches were left out: a task has at most 1024 sessions",
    ]


async def test_a_failed_branch_is_run_again_from_where_it_began(store: Store) -> None:
    await store.tasks.submit(idle_task(branching={"at": "idle"}))
    (sample,) = await claim(store)
    await end(store, sample, 3)
    (branch,) = await claim(store)
    failed = result_of(branch, status=SessionStatus.FAILED, failure=FailureReason.INFRASTRUCTURE)
    await complete(store, branch.key, failed, retries=Retries(3, 0.0))
    (again,) = await claim(store)
    assert (again.session_id, again.attempt, again.origin) == (branch.session_id, 2, branch.origin)


async def test_branches_are_no_samples_of_which_there_can_be_enough(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=4, early_stop=2, branching={"at": "idle"}))
    first, second = await claim(store, 2)
    await end(store, first, 3)
    (branch,) = [lease for lease in await claim(store, 9) if lease.origin is not None]
    await end(store, branch)
    assert await statuses(store) == [COMPLETED] + [SessionStatus.INIT] * 3 + [COMPLETED]
    await end(store, second, 3)
    # The other samples are asked to end; the branch of the last one is still wanted.
    assert await statuses(store) == [COMPLETED] * 2 + [SessionStatus.INIT] * 2 + [COMPLETED, QUEUED]


async def test_a_cancelled_session_or_task_gets_no_branches(store: Store) -> None:
    await store.tasks.submit(idle_task(samples=3, branching={"at": "idle"}))
    one, two, three = await claim(store, 3)
    await store.sessions.cancel(one.session_id)
    await end(store, one, 3)
    await end(store, two, 3)
    assert await origins(store) == [None, None, None, (two.session_id, 3, 1)]
    await store.tasks.cancel("task")
    await end(store, three, 3)
    assert await statuses(store) == [COMPLETED] * 3 + [CANCELLED]
    assert (await store.tasks.get("task")).status is TaskStatus.CANCELLED


async def test_no_branch_slips_past_the_cancellation_of_its_task(tmp_path: Path) -> None:
    url = fresh_postgres()
    engine = create_async_engine(parsed(url))
    is_waiting = text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    async with Store.open(tmp_path, database_url=url) as store:
        await store.tasks.submit(idle_task(branching={"at": "idle", "samples": 3}))
        (lease,) = await claim(store)
        result = result_of(lease, stats=STATS, has_recording=True, branch_at=(2,))
        delivery = Delivery(key=lease.key, result=result)
        async with engine.connect() as delivering, engine.connect() as watching:
            await delivering.run_sync(complete_rows, [delivery], 0.0, Retries())
            cancelling = asyncio.create_task(store.tasks.cancel("task"))
            while not (await watching.execute(is_waiting)).scalar_one():
                await watching.rollback()
            await delivering.commit()
            await cancelling
        assert await statuses(store) == [COMPLETED] + [CANCELLED] * 3
    await engine.dispose()


async def test_branches_wait_as_a_new_task_does(store: Store) -> None:
    sample = await ended_sample(store, "old")
    await store.tasks.submit(idle_task("large", samples=2 * SAMPLES_PER_TURN))
    await claim(store, SAMPLES_PER_TURN)
    await store.branches.add("old", Origin(session_id=sample.id, calls=1), 2)
    await store.tasks.submit(idle_task("new"))
    order = [lease.task.id for lease in await claim(store, SAMPLES_PER_TURN + 3)]
    assert order == ["large"] * SAMPLES_PER_TURN + ["old"] * 2 + ["new"]


async def test_a_task_ends_for_its_webhook_once_its_branches_have(store: Store) -> None:
    webhook = Webhook(url="https://hooks.example/polar", events=(WebhookEvent.TASK_ENDED,))
    await store.tasks.submit(idle_task(webhook=webhook, branching={"at": "idle"}))
    told = []
    for branch_at in ((3,), ()):
        (lease,) = await claim(store)
        await end(store, lease, *branch_at)
        target = await store.webhooks.claim(seconds=60)
        assert target is not None
        batch = await store.webhooks.read(target, limit=10)
        await store.webhooks.settle(target, batch.cursor)
        told.append([notice.task and notice.task.sessions for _, notice in batch.notices])
    assert told == [[], [{COMPLETED: 2}]]


async def test_a_recording_is_kept_while_a_session_is_to_begin_with_it(store: Store, clock: Clock) -> None:
    sample = await ended_sample(store)
    await store.branches.add("task", Origin(session_id=sample.id, calls=1), 1)
    clock.now += 10 * DAY
    keep = Retention(recordings=DAY, orphans=float("inf"))
    assert (await sweep(store, keep)).recordings == 0
    (branch,) = await claim(store)
    assert (await sweep(store, keep)).recordings == 0
    await end(store, branch)
    assert (await sweep(store, keep)).recordings == 1
    with pytest.raises(NotFound, match="has no recordings"):
        await store.recorded(sample.id)


async def test_a_back_up_holds_where_sessions_began(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "data") as store:
        sample = await ended_sample(store)
        added, _ = await store.branches.add("task", Origin(session_id=sample.id, calls=1), 1, "mine")
    back_up(tmp_path / "data", tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "restored")
    async with Store.open(tmp_path / "restored") as store:
        again = await store.branches.add("task", Origin(session_id=sample.id, calls=1), 1, "mine")
        assert again == (added, False)


async def test_a_task_may_begin_with_a_recording_and_is_another_one_with_another(store: Store) -> None:
    sample = await ended_sample(store)
    origin = Origin(session_id=sample.id, samples_on=False)
    for is_new in (True, False):
        assert (await store.tasks.submit(idle_task("copy"), origin))[1] is is_new
    for other in (None, origin.model_copy(update={"calls": 2})):
        with pytest.raises(Conflict, match="'copy' exists with other content"):
            await store.tasks.submit(idle_task("copy"), other)
    (lease,) = await claim(store)
    assert (lease.session_id, lease.origin) == ("copy.0", origin)
