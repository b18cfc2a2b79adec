"""Every task belongs to a run, whoever submits it; what a trainer reports of its steps is there once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polar.errors import Conflict, NotFound
from polar.models.session import Origin, SessionStatus
from polar.models.task import Run, RunKind
from polar.models.views import MOST_NUMBERS, RunStart, RunStep, SessionFilter
from polar.store.runs import POINTS, SPANS
from polar.store.store import Store
from tests.databases import fresh_postgres
from tests.fakes.control_plane import Clock, complete, idle_task, result_of

TRAINING = Run(name="grpo", kind=RunKind.TRAINING)


async def roll_out(store: Store, clock: Clock, id: str, rewards: list[float], **changes: Any) -> None:
    """A task whose sessions end one second after another."""
    await store.tasks.submit(idle_task(id, samples=len(rewards), **changes))
    for lease in await store.leases.claim("north", limit=len(rewards), runtimes=["idle"], seconds=6000):
        clock.now += 1
        await complete(store, lease.key, result_of(lease, reward=rewards[lease.sample]))


async def test_a_run_counts_its_own(store: Store, clock: Clock) -> None:
    await roll_out(store, clock, "a", [1.0, 0.0], run=TRAINING)
    await roll_out(store, clock, "b", [1.0], run=TRAINING)
    await store.tasks.submit(idle_task("c", samples=3))
    run = await store.runs.get("grpo")
    assert (run.kind, run.tasks, run.sessions) == (RunKind.TRAINING, 2, {SessionStatus.COMPLETED: 3})
    assert run.mean_reward == pytest.approx(2 / 3)
    assert run.updated_at == clock.now
    unnamed = await store.runs.get("unnamed")
    assert (unnamed.kind, unnamed.sessions) == (RunKind.SUBMISSION, {SessionStatus.QUEUED: 3})
    assert unnamed.updated_at == unnamed.created_at
    assert [one.name for one in (await store.runs.page()).runs] == ["unnamed", "grpo"]
    with pytest.raises(NotFound, match="polar runs"):
        await store.runs.get("other")


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_runs_are_paged_newest_first(store: Store, limit: int) -> None:
    for number in range(4):
        kind = RunKind.BRIDGE if number == 2 else RunKind.SUBMISSION
        await store.tasks.submit(idle_task(f"t{number}", run=Run(name=f"run-{number}", kind=kind)))
    found: list[str] = []
    after = None
    while True:
        page = await store.runs.page(limit=limit, after=after)
        found += [run.name for run in page.runs]
        if (after := page.next) is None:
            break
    assert found == ["run-3", "run-2", "run-1", "run-0"]
    assert [run.name for run in (await store.runs.page(kind=RunKind.BRIDGE)).runs] == ["run-2"]
    assert [run.name for run in (await store.runs.page(text="n-1")).runs] == ["run-1"]


async def test_a_task_that_is_there_stays_in_its_run(store: Store) -> None:
    await store.tasks.submit(idle_task("a", run=TRAINING))
    _, is_new = await store.tasks.submit(idle_task("a", run=Run(name="later")))
    assert not is_new
    with pytest.raises(NotFound):
        await store.runs.get("later")


async def test_a_name_is_of_one_kind(store: Store) -> None:
    await store.tasks.submit(idle_task("a", run=TRAINING))
    with pytest.raises(Conflict, match="'grpo' is of kind training here, not submission"):
        await store.tasks.submit(idle_task("b", run=Run(name="grpo")))
    assert (await store.sessions.page()).next is None
    assert len((await store.tasks.page()).tasks) == 1


async def test_nobody_takes_the_run_of_tasks_that_name_none(store: Store) -> None:
    with pytest.raises(Conflict, match="'unnamed' is of kind submission here, not training"):
        await store.runs.begin("unnamed", RunStart())
    await store.tasks.submit(idle_task("a"))
    assert (await store.runs.get("unnamed")).kind is RunKind.SUBMISSION


async def test_branches_and_replays_are_of_their_parents_run(store: Store, clock: Clock) -> None:
    await roll_out(store, clock, "a", [1.0], run=TRAINING)
    await store.branches.add("a", Origin(session_id="a.0", calls=0), samples=2)
    copy = (await store.tasks.get("a")).spec.model_copy(update={"id": "a-replay"})
    await store.tasks.submit(copy, Origin(session_id="a.0"))
    of_run = await store.sessions.page(SessionFilter(run="grpo"))
    assert [one.id for one in of_run.sessions] == ["a.0", "a.1", "a.2", "a-replay.0"]


async def test_steps_name_the_tasks_that_they_learned_from(store: Store, clock: Clock) -> None:
    await roll_out(store, clock, "a", [1.0], run=TRAINING)
    await roll_out(store, clock, "b", [0.0], run=TRAINING)
    await roll_out(store, clock, "other", [0.0])
    first = RunStep(step=1, numbers={"reward": 0.5}, tasks=("a", "other"))
    await store.runs.report("grpo", [first, RunStep(step=2, numbers={"reward": 0.7, "loss": 1.0})])
    rows = (await store.listing.tasks(run="grpo", limit=10)).tasks
    assert {row.id: row.step for row in rows} == {"a": 1, "b": None}
    assert [row.id for row in (await store.listing.tasks(run="grpo", step=1, limit=10)).tasks] == ["a"]
    assert (await store.tasks.get("other")).step is None
    run = await store.runs.get("grpo")
    assert (run.step, run.latest) == (2, {"reward": 0.7, "loss": 1.0})
    await store.runs.begin("grpo", RunStart(step=1))
    assert (await store.tasks.get("a")).step == 1
    await store.runs.report("grpo", [RunStep(step=2, numbers={"reward": 0.7, "loss": 1.0})])
    curves = await store.runs.curves("grpo")
    assert curves.steps == (1, 2)
    assert curves.series == {"reward": (0.5, 0.7), "loss": (None, 1.0)}
    await store.runs.begin("grpo", RunStart())
    assert (await store.tasks.get("a")).step is None


@pytest.mark.parametrize(("again", "kept"), [(0, ()), (2, (0, 1, 2)), (9, (0, 1, 2, 3))])
async def test_a_run_that_begins_again_drops_later_steps(
    store: Store, again: int, kept: tuple[int, ...]
) -> None:
    await store.runs.begin("grpo", RunStart())
    await store.runs.report("grpo", [RunStep(step=step, numbers={"loss": 1.0}) for step in range(4)])
    await store.runs.report("grpo", [RunStep(step=1, numbers={"loss": 2.0})])
    await store.runs.begin("grpo", RunStart(step=again))
    curves = await store.runs.curves("grpo")
    assert curves.steps == kept
    assert curves.series == (
        {"loss": tuple(2.0 if step == 1 else 1.0 for step in curves.steps)} if kept else {}
    )


async def test_a_long_run_is_thinned_out_and_keeps_its_end(store: Store) -> None:
    await store.runs.begin("grpo", RunStart())
    steps = [RunStep(step=step, numbers={"loss": step / 2}) for step in range(1, 2_501)]
    await store.runs.report("grpo", steps)
    curves = await store.runs.curves("grpo")
    assert len(curves.steps) <= POINTS
    assert (curves.steps[-1], curves.series["loss"][-1]) == (2_500, 1_250.0)


async def test_numbers_of_ever_new_names_fill_no_page(store: Store) -> None:
    await store.runs.begin("grpo", RunStart())
    numbers = [{f"reward/{step}-{name}": 1.0 for name in range(MOST_NUMBERS - 1)} for step in range(3)]
    steps = [RunStep(step=step, numbers={"loss": 0.5, **named}) for step, named in enumerate(numbers)]
    await store.runs.report("grpo", steps)
    series = (await store.runs.curves("grpo")).series
    assert series.keys() == {"loss", *numbers[-1]}
    assert series["loss"] == (0.5, 0.5, 0.5)


async def test_rewards_are_averaged_over_equal_spans_of_time(store: Store, clock: Clock) -> None:
    began = clock.now
    rewards = [float(number >= 2 * SPANS) for number in range(4 * SPANS)]
    await roll_out(store, clock, "a", rewards, run=TRAINING)
    curves = await store.runs.curves("grpo")
    assert len(curves.rewards) == len(curves.hours) == SPANS
    assert curves.hours[-1] == pytest.approx((clock.now - began) / 3600)
    assert list(curves.rewards) == sorted(curves.rewards)
    assert (curves.rewards[0], curves.rewards[-1]) == (0.0, 1.0)
    await store.tasks.submit(idle_task("c"))
    assert (await store.runs.curves("unnamed")).rewards == ()


async def test_few_rewards_are_averaged_over_fewer_spans(store: Store, clock: Clock) -> None:
    await roll_out(store, clock, "a", [1.0, 0.0, 1.0], run=Run(name="small"))
    await roll_out(store, clock, "b", [1.0] * 4 + [0.0, 1.0] * 2, run=TRAINING)
    assert list((await store.runs.curves("small")).rewards) == pytest.approx([2 / 3])
    assert (await store.runs.curves("grpo")).rewards == (1.0, 0.5)


async def test_servers_that_begin_a_run_at_once_begin_one(tmp_path: Path) -> None:
    url = fresh_postgres()
    async with (
        Store.open(tmp_path / "a", database_url=url) as one,
        Store.open(tmp_path / "b", database_url=url) as other,
    ):
        tasks = [idle_task(f"t{number}", run=TRAINING) for number in range(20)]
        stores = [one, other]
        await asyncio.gather(*(stores[n % 2].tasks.submit(task) for n, task in enumerate(tasks)))
        (run,) = (await one.runs.page()).runs
        assert (run.name, run.tasks) == ("grpo", 20)
