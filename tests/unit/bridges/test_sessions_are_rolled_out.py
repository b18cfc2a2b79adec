"""What every bridge shares: tasks go out, sessions come back in order, a server may be away for a while."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from polar import errors
from polar.bridges import sessions
from polar.bridges.sessions import (
    Order,
    ScoredSession,
    one_session,
    roll_out_groups,
    run_of_trainer,
    task_of,
    task_row,
)
from polar.client import AsyncClient
from polar.errors import Backoff, InvalidInput
from polar.models.task import Branching, RunKind, TaskSpec
from polar.models.views import TaskView
from tests.fakes.rollout_client import ReversingClient
from tests.systems import shell_task


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(errors, "RESTART", Backoff(0.0, 0.0, attempts=4))
    return ReversingClient()


def orders(count: int) -> list[Order]:
    return [Order(shell_task(f"task-{number}", "true"), samples=2) for number in range(count)]


async def test_each_order_gets_its_own_sessions_in_the_order_of_samples(client: Any) -> None:
    groups = await roll_out_groups(client, orders(3), 0.7)
    submitted = client.submitted
    for number, (spec, group) in enumerate(zip(submitted, groups, strict=True)):
        assert spec.id.endswith(f"-task-{number}")
        assert [one.result.sample for one in group] == [0, 1]
        assert {one.result.task_id for one in group} == {spec.id}
        assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k) == (0.7, 1.0, 0)
    assert [[one.reward for one in group] for group in groups] == [[1.0, 0.0]] * 3


async def test_a_trainer_gets_the_sessions_that_it_asked_for_and_no_branches(client: Any) -> None:
    branching = Branching.model_validate({"at": "calls"})
    (order,) = orders(1)
    task = order.task.model_copy(update={"branching": branching})
    await roll_out_groups(client, [Order(task, order.samples)])
    assert [spec.branching for spec in client.submitted] == [None]


async def test_the_same_task_twice_is_two_rollouts(client: Any) -> None:
    await roll_out_groups(client, orders(1))
    await roll_out_groups(client, orders(1))
    assert len({spec.id for spec in client.submitted}) == 2


async def test_a_server_that_comes_back_is_waited_for(client: Any) -> None:
    client.failures = 2
    (group,) = await roll_out_groups(client, orders(1))
    assert [len(one.traces) for one in group] == [1, 1]


async def test_a_lost_recording_is_counted_and_keeps_its_reward(client: Any) -> None:
    submit = client.submit

    async def submit_and_lose_one(task: TaskSpec) -> TaskView:
        view: TaskView = await submit(task)
        client.lost.add(client.groups[task.id].samples[1].result.session_id)
        return view

    client.submit = submit_and_lose_one
    ((kept, lost),) = await roll_out_groups(client, orders(1))
    assert kept.traces
    assert not kept.excluded
    assert (lost.traces, lost.reward, lost.excluded) == ((), 0.0, Counter({"sessions_unreadable": 1}))


async def test_samples_asked_for_one_by_one_do_not_share_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    session: Any = object()

    async def roll_out_groups(
        _: Any, orders: list[Order], temperature: float
    ) -> list[tuple[ScoredSession, ...]]:
        seeds.append(orders[0].task.sampling.seed)
        return [(session,)]

    monkeypatch.setattr(sessions, "roll_out_groups", roll_out_groups)
    task = shell_task("fixed", "true", sampling={"seed": 7, "max_tokens": 5})
    assert await one_session(AsyncClient("http://127.0.0.1:9", "token"), task) is session
    assert seeds == [None]


def test_a_task_travels_in_a_row() -> None:
    task = shell_task("carried", "true", sampling={"max_tokens": 5})
    assert task_of(task_row(task)) == task
    assert task_of({"polar_task": task.model_dump(mode="json")}) == task


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "no 'polar_task'"),
        ({"polar_task": "{"}, "not JSON"),
        ({"polar_task": {"id": "x"}}, "instruction"),
    ],
)
def test_a_row_without_a_sound_task_is_refused(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        task_of(row)


@pytest.mark.parametrize(("given", "name"), [("verl run 3", "verl-run-3"), (None, r"bridge-\d{4}-\d\d-\d\d")])
async def test_what_a_trainer_rolls_out_is_one_run(
    client: Any, monkeypatch: pytest.MonkeyPatch, given: str | None, name: str
) -> None:
    monkeypatch.delenv("POLAR_RUN", raising=False)
    if given is not None:
        monkeypatch.setenv("POLAR_RUN", given)
    run_of_trainer.cache_clear()
    await roll_out_groups(client, orders(2))
    await roll_out_groups(client, orders(1))
    (run,) = {spec.run for spec in client.submitted}
    assert run.kind is RunKind.BRIDGE
    assert re.fullmatch(name, run.name)
    run_of_trainer.cache_clear()
