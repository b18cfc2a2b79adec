"""Rollouts run ahead of training by no more than they may, and a run that goes on takes the same groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from polar import errors
from polar.app.rollouts import training_task
from polar.errors import Backoff
from polar.models.task import TaskSpec
from polar.training.material import Material, PolicyVersions
from polar.training.rollouts import RolloutSource
from polar.training.settings import GrpoSettings
from polar.trajectory.learnable import Excluded
from tests.fakes.rollout_client import ANSWERS, REWARDS, RolloutClient
from tests.fakes.scripted_rollouts import group
from tests.systems import shell_task

TASKS = [shell_task(f"t{number}", "true") for number in range(3)]
GROUPS = 2


def settings(**changes: Any) -> GrpoSettings:
    document = {
        "out": Path("unused"),
        "steps": 9,
        "groups": GROUPS,
        "rollouts": {"tasks": ["unused"], "samples": 2, "synchronous": changes.pop("synchronous", False)},
        "objective": {"max_staleness": 2},
    }
    return GrpoSettings.model_validate({**document, **changes})


def source(client: RolloutClient, **changes: Any) -> RolloutSource:
    asked = settings(**changes)
    assert asked.rollouts is not None
    return RolloutSource(asked, asked.rollouts, lambda: cast(Any, client), TASKS)


def names(made: Material) -> list[str]:
    return sorted({name.partition("/")[0] for batch in made.packing.batches for name in batch.names})


@pytest.mark.parametrize(("synchronous", "ahead"), [(True, 0), (False, 2)])
def test_what_is_in_flight_while_training_is_bounded(synchronous: bool, ahead: int) -> None:
    client = RolloutClient()
    made = source(client, synchronous=synchronous)
    for step in range(1, 5):
        assert len(names(made.take(PolicyVersions(0)))) == 2 * GROUPS
        assert len(client.submitted) == GROUPS * (step + ahead)


def test_a_group_is_taken_with_all_its_branches() -> None:
    client = RolloutClient()
    client.branching = {"-t1"}
    made = source(client)
    for _ in range(3):
        made.take(PolicyVersions(0))
    taken = [id for id in client.groups if client.groups[id].samples[0].result.session_id in client.asked]
    assert len(taken) == 3 * GROUPS
    assert any(id.endswith("-t1") for id in taken)
    expected = {one.result.session_id for id in taken for one in client.groups[id].samples}
    assert set(client.asked) == expected


def test_a_server_that_calls_results_stale_neither_keeps_nor_delays_them() -> None:
    client = RolloutClient()
    client.all_are_stale = True
    made = source(client)
    for step in range(1, 5):
        assert len(names(made.take(PolicyVersions(0)))) == 2 * GROUPS
        assert len(client.submitted) == GROUPS * (step + 2)


def test_a_step_reads_the_feed_from_where_its_oldest_task_was_submitted() -> None:
    client = RolloutClient()
    client.feed = [one.result for one in group(ANSWERS, REWARDS, task_id="of-another-run").samples] * 500
    made = source(client)
    for _ in range(5):
        made.take(PolicyVersions(0))
    assert min(client.cursors) == 1000
    in_flight = GROUPS * 3 * len(REWARDS)
    assert client.cursors[-1] >= len(client.feed) - in_flight


def test_every_task_is_rolled_out_in_each_round_and_sampled_as_the_trainer_computes() -> None:
    client = RolloutClient()
    made = source(client, synchronous=True, objective={"temperature": 0.7})
    for _ in range(3):
        made.take(PolicyVersions(0))
    assert len({task.id for task in client.submitted}) == 6
    assert [sorted(t.id.rpartition("-")[2] for t in client.submitted[at : at + 3]) for at in (0, 3)] == (
        [["t0", "t1", "t2"]] * 2
    )
    pins = {(t.sampling.temperature, t.sampling.top_p, t.sampling.top_k) for t in client.submitted}
    assert pins == {(0.7, 1.0, 0)}


def test_a_run_that_goes_on_takes_the_groups_that_it_would_have_taken() -> None:
    client = RolloutClient()
    whole = source(client)
    whole.take(PolicyVersions(0))
    state = whole.state()
    expected = [names(whole.take(PolicyVersions(0))) for _ in range(3)]
    again = source(client)
    again.restore(state)
    assert [names(again.take(PolicyVersions(0))) for _ in range(3)] == expected
    ids = [task.id for task in client.submitted]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("stops", [(6,), (1, 2, 3), (4, 2)])
def test_a_run_that_goes_on_finds_what_ended_among_slower_tasks(
    stops: tuple[int, ...], synchronous: bool
) -> None:
    client = RolloutClient()
    client.slow = {"-t0"}
    whole = source(client, synchronous=synchronous)
    whole.take(PolicyVersions(0))
    state = whole.state()
    expected = [names(whole.take(PolicyVersions(0))) for _ in range(6)]
    assert all(len(sessions) == 2 * GROUPS for sessions in expected)
    found = []
    for steps in stops:
        again = source(client, synchronous=synchronous)
        again.restore(state)
        found += [names(again.take(PolicyVersions(0))) for _ in range(steps)]
        state = again.state()
    assert found == expected


def test_a_lost_recording_is_counted_and_training_goes_on() -> None:
    client = RolloutClient()
    made = source(client)
    made.take(PolicyVersions(0))
    in_flight = client.groups[client.submitted[-1].id]
    client.lost.add(in_flight.samples[0].result.session_id)
    excluded = [made.take(PolicyVersions(0)).excluded for _ in range(3)]
    assert sum(one[Excluded.SESSIONS_UNREADABLE] for one in excluded) == 1


def test_a_server_that_is_away_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "RESTART", Backoff(0.0, 0.0, attempts=4))
    client = RolloutClient()
    client.failures = 2
    assert names(source(client).take(PolicyVersions(0)))


def test_names_of_rollouts_are_valid_ids_however_long_the_tasks_are() -> None:
    long = shell_task("x" * 128, "true")
    assert TaskSpec.model_validate(training_task(long, "run-1", 2, 1.0).model_dump()).id.startswith(
        "run-1-xxx"
    )
