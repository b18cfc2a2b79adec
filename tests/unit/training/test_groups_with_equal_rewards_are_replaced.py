"""A group whose rewards are all equal is replaced by a spare one, and its task sits out while it shall."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.training.material import Material, PolicyVersions
from polar.training.rollouts import RolloutSource
from polar.training.settings import GrpoSettings
from polar.trajectory.learnable import Excluded
from tests.fakes.rollout_client import RolloutClient
from tests.systems import shell_task

COUNT = 6
TASKS = [shell_task(f"t{number}", "true") for number in range(COUNT)]
GROUPS = 2


def source(client: RolloutClient, max_staleness: int = 1, **rollouts: Any) -> RolloutSource:
    run = GrpoSettings.model_validate(
        {
            "out": Path("unused"),
            "steps": 9,
            "groups": GROUPS,
            "rollouts": {"tasks": ["unused"], "samples": 2, **rollouts},
            "objective": {"max_staleness": max_staleness},
        }
    )
    assert run.rollouts is not None
    return RolloutSource(run, run.rollouts, lambda: cast(Any, client), TASKS)


def client(*equal: int) -> RolloutClient:
    made = RolloutClient()
    made.equal = {f"-t{number}" for number in equal}
    return made


def learnt(made: Material) -> int:
    """Groups that there is something to learn from."""
    sessions = {name.partition("/")[0] for batch in made.packing.batches for name in batch.names}
    return len({session.rpartition("-")[0] for session in sessions})


def turns(server: RolloutClient, task: int) -> int:
    return sum(spec.id.endswith(f"-t{task}") for spec in server.submitted)


def test_without_spares_groups_are_taken_as_they_come() -> None:
    server = client(0, 1, 2)
    made = source(server)
    taken = [made.take(PolicyVersions(0)) for _ in range(3)]
    assert sum(one.numbers["groups"] for one in taken) == 3 * GROUPS == COUNT
    assert sum(one.excluded[Excluded.GROUPS_EQUAL] for one in taken) == 3
    assert all(turns(server, task) >= 1 for task in range(COUNT))


def test_with_spares_every_step_has_its_groups_and_the_others_are_counted() -> None:
    made = source(client(0, 1, 2), spares=COUNT)
    for _ in range(6):
        taken = made.take(PolicyVersions(0))
        assert learnt(taken) == GROUPS
        assert taken.numbers["groups"] == GROUPS + taken.excluded[Excluded.GROUPS_EQUAL]


def test_spares_end_where_nothing_can_be_learnt() -> None:
    taken = source(client(*range(COUNT)), spares=3).take(PolicyVersions(0))
    assert learnt(taken) == 0
    assert taken.numbers["groups"] == taken.excluded[Excluded.GROUPS_EQUAL] == GROUPS + 3


@pytest.mark.parametrize("ahead", [0, 1])
def test_spares_leave_no_more_in_flight_while_training(ahead: int) -> None:
    server = client(0, 1, 2)
    made = source(server, max_staleness=ahead, spares=COUNT)
    taken = 0.0
    for _ in range(6):
        taken += made.take(PolicyVersions(0)).numbers["groups"]
        assert len(server.submitted) - taken == GROUPS * ahead


def test_recordings_that_teach_nothing_are_not_read() -> None:
    server = client(*range(COUNT))
    source(server).take(PolicyVersions(0))
    assert not server.asked


@pytest.mark.parametrize("rest", [0, 1, 3])
def test_a_task_sits_out_and_comes_back(rest: int) -> None:
    server = client(0)
    made = source(server, max_staleness=0, rest=rest)
    passed_over = 0
    # The other tasks come every round: rounds are counted by one of them.
    while turns(server, 1) < 2 * (1 + rest) + 1:
        passed_over += made.take(PolicyVersions(0)).excluded[Excluded.TASKS_RESTING]
    assert turns(server, 0) in (2, 3)
    assert passed_over in (2 * rest, 2 * rest + 1) if rest else passed_over == 0


def test_a_run_goes_on_while_all_tasks_rest() -> None:
    server = client(*range(COUNT))
    made = source(server, rest=5)
    for _ in range(2 * COUNT):
        assert made.take(PolicyVersions(0)).numbers["groups"] == GROUPS


@settings(max_examples=20, deadline=None)
@given(
    equal=st.sets(st.integers(0, COUNT - 1)),
    spares=st.integers(0, 4),
    rest=st.integers(0, 3),
    before=st.integers(0, 5),
)
def test_a_run_that_goes_on_takes_the_same_groups(
    equal: set[int], spares: int, rest: int, before: int
) -> None:
    server = client(*equal)
    whole = source(server, spares=spares, rest=rest)
    for _ in range(before):
        whole.take(PolicyVersions(0))
    state = whole.state()
    expected = [taken(whole.take(PolicyVersions(0))) for _ in range(3)]
    again = source(server, spares=spares, rest=rest)
    again.restore(state)
    assert [taken(again.take(PolicyVersions(0))) for _ in range(3)] == expected
    ids = [spec.id for spec in server.submitted]
    assert len(ids) == len(set(ids))


def taken(made: Material) -> tuple[Any, ...]:
    return made.numbers, made.excluded, sorted(name for batch in made.packing.batches for name in batch.names)
