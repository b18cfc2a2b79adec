"""What lists and the overview show is what is stored: filters, pages by key, rewards, minutes, nodes."""

from __future__ import annotations

from typing import Any

import pytest

from polar.errors import NotFound
from polar.models.policy import PolicyReport
from polar.models.session import SessionStatus, StageSeconds, TrajectoryStats
from polar.models.task import Run, RunKind, TaskStatus
from polar.models.views import Reward, RunStep, SessionFilter, SessionView
from polar.store.store import Store
from tests.fakes.control_plane import Clock, complete, idle_task, result_of


async def end_some(store: Store) -> None:
    """`first` with rewards 1 and 0 and one at work; `second` with one that failed and one that waits."""
    run = Run(name="north-run", kind=RunKind.TRAINING)
    await store.tasks.submit_all([idle_task("first", samples=3, run=run), idle_task("second", samples=2)])
    await store.runs.report("north-run", [RunStep(step=3, tasks=("first", "second"))])
    about: dict[str, Any] = {
        "model": "small",
        "policy_version_min": 3,
        "policy_version_max": 5,
        "seconds": StageSeconds(init=1, running=2),
    }
    leases = await store.leases.claim("north", limit=4, runtimes=["idle"], seconds=60)
    for lease in leases:
        stats = TrajectoryStats(
            sampled_tokens=10, trainable_tokens=7, excluded={"auxiliary": 3}, completions=2
        )
        if lease.session_id == "second.0":
            result = result_of(lease, status=SessionStatus.FAILED, error="no", **about)
        elif lease.sample < 2:
            result = result_of(lease, reward=1.0 - lease.sample, stats=stats, **about)
        else:
            continue
        await complete(store, lease.key, result)


async def ids(store: Store, *, limit: int = 50, **wanted: Any) -> list[str]:
    """Of all pages."""
    found: list[str] = []
    before = None
    while True:
        page = await store.listing.sessions(SessionFilter(**wanted), limit=limit, before=before)
        found += [row.id for row in page.sessions]
        before = page.older
        if before is None:
            return found


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_pages_hold_every_session_once_newest_first(store: Store, limit: int) -> None:
    await end_some(store)
    assert await ids(store, limit=limit) == ["second.1", "second.0", "first.2", "first.1", "first.0"]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"status": SessionStatus.FAILED}, ["second.0"]),
        ({"task_id": "first"}, ["first.2", "first.1", "first.0"]),
        ({"node": "north", "status": SessionStatus.COMPLETED}, ["first.1", "first.0"]),
        ({"reward": Reward.POSITIVE}, ["first.0"]),
        ({"reward": Reward.ZERO}, ["first.1"]),
        ({"reward": Reward.NONE}, ["second.1", "second.0", "first.2"]),
        ({"text": "cond."}, ["second.1", "second.0"]),
        ({"text": "%"}, []),
        ({"run": "north-run"}, ["first.2", "first.1", "first.0"]),
        ({"run": "none"}, []),
        ({"step": 3}, ["first.2", "first.1", "first.0"]),
        ({"step": 3, "run": "unnamed"}, []),
        ({"harness": "idle", "status": SessionStatus.FAILED}, ["second.0"]),
        ({"harness": "pi"}, []),
        ({"model": "small"}, ["second.0", "first.1", "first.0"]),
        ({"version": 4}, ["second.0", "first.1", "first.0"]),
        ({"version": 6}, []),
        ({"reward_min": 0.5}, ["first.0"]),
        ({"reward_max": 0.5}, ["first.1"]),
        ({"reward_min": 0.0, "reward_max": 1.0}, ["first.1", "first.0"]),
        ({"seconds_min": 3.0}, ["second.0", "first.1", "first.0"]),
        ({"seconds_max": 2.9}, []),
    ],
)
async def test_filters_find_exactly_what_matches(
    store: Store, wanted: dict[str, Any], found: list[str]
) -> None:
    await end_some(store)
    assert await ids(store, **wanted) == found


async def test_models_of_any_name_are_stored_and_found(store: Store) -> None:
    names = ["odd\0name", "long" * 100, "\N{GRINNING FACE}"]
    await store.tasks.submit(idle_task("first", samples=len(names)))
    leases = await store.leases.claim("north", limit=len(names), runtimes=["idle"], seconds=60)
    for lease, name in zip(leases, names, strict=True):
        await complete(store, lease.key, result_of(lease, model=name))
    assert [await ids(store, model=name) for name in names] == [["first.0"], ["first.1"], ["first.2"]]


async def test_row_says_what_the_session_says(store: Store) -> None:
    await end_some(store)
    (row,) = (await store.listing.sessions(SessionFilter(text="first.0"), limit=1)).sessions
    view: SessionView = await store.sessions.get("first.0")
    assert (row.reward, row.completions, row.sampled_tokens) == (1.0, 2, 10)
    assert (row.status, row.node, row.attempt) == (view.status, view.node, view.attempt)
    assert row.run == view.run == "north-run"
    assert [one.id for one in await store.listing.group("first")] == ["first.0", "first.1", "first.2"]
    with pytest.raises(NotFound):
        await store.listing.group("third")


async def test_tasks_are_listed_with_their_rewards(store: Store) -> None:
    await end_some(store)

    async def names(**asked: object) -> list[str]:
        every: dict[str, Any] = {"status": None, "harness": None, "text": None, "limit": 10, "before": None}
        return [row.id for row in (await store.listing.tasks(**{**every, **asked})).tasks]

    assert await names() == ["second", "first"]
    assert await names(status=TaskStatus.FINISHED) == []
    assert await names(harness="idle", text="irs") == ["first"]
    assert await names(harness="other") == []
    page = await store.listing.tasks(status=None, harness=None, text=None, limit=1, before=None)
    rest = await store.listing.tasks(status=None, harness=None, text=None, limit=1, before=page.older)
    (row,) = rest.tasks
    assert (row.id, row.rewards, row.status) == ("first", (1.0, 0.0), TaskStatus.RUNNING)
    assert (page.older is not None, rest.older) == (True, None)


async def test_minutes_add_up_to_what_ended(store: Store, clock: Clock) -> None:
    clock.now = 600_000.0
    await end_some(store)
    clock.now += 61.0
    (lease,) = await store.leases.claim("north", limit=1, runtimes=["idle"], seconds=60)
    await complete(store, lease.key, result_of(lease, reward=0.5))
    minutes = await store.listing.minutes()
    assert len(minutes) == 60
    assert minutes[-1].at <= clock.now < minutes[-1].at + 60
    assert [(one.ended, one.usable, one.sampled_tokens, one.trainable_tokens) for one in minutes[-2:]] == [
        (3, 2, 20, 14),
        (1, 0, 0, 0),
    ]
    assert [one.mean_reward for one in minutes[-2:]] == [0.5, 0.5]
    assert sum(one.ended for one in minutes) == 4


async def test_minutes_count_no_token_twice(store: Store) -> None:
    await store.tasks.submit(idle_task())
    (lease,) = await store.leases.claim("north", limit=1, runtimes=["idle"], seconds=60)
    stats = TrajectoryStats(sampled_tokens=30, trainable_tokens=10, excluded={"replayed": 20})
    await complete(store, lease.key, result_of(lease, stats=stats))
    assert (await store.listing.minutes())[-1].sampled_tokens == 10


async def test_nodes_are_those_that_report_or_hold_sessions(store: Store, clock: Clock) -> None:
    await end_some(store)
    await store.policy.report("south", PolicyReport(step=0, version=3, error="no memory"))
    clock.now += 30
    await store.policy.report("west", PolicyReport(step=0, version=3))
    north, south, west = await store.nodes.all()
    assert (north.name, north.is_silent, north.sessions) == ("north", True, {SessionStatus.INIT: 1})
    assert (south.name, south.is_silent, south.seconds_silent, south.error) == (
        "south",
        True,
        30,
        "no memory",
    )
    assert (west.name, west.is_silent, west.version, west.error) == ("west", False, 3, None)


async def test_latest_events_and_their_end(store: Store) -> None:
    assert await store.events.newest() == 0
    await end_some(store)
    latest = await store.events.latest(2)
    assert [event.seq for event in latest] == sorted((event.seq for event in latest), reverse=True)
    assert await store.events.newest() == latest[0].seq
    assert (await store.events.after(await store.events.newest())).events == ()
