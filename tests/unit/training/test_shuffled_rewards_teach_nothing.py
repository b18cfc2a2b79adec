"""The control: a group keeps its rewards, but chance deals them out among its sessions, alike on resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.models.session import Verdict
from polar.training.material import Material, PolicyVersions, material
from polar.training.rollouts import RolloutSource
from polar.training.run import train
from polar.training.settings import BatchSettings, GrpoSettings, ObjectiveSettings, Pack
from polar.training.sources import Recordings
from polar.trajectory.learnable import Group
from polar.trajectory.per_request import PerRequest
from tests.fakes.rollout_client import RolloutClient
from tests.fakes.scripted_rollouts import group, write_recordings
from tests.fakes.training_runs import quiet
from tests.fakes.training_runs import settings as tiny_run
from tests.systems import shell_task

SHUFFLED = ObjectiveSettings.model_validate({"rewards": "shuffled", "advantage": "mean"})
"""An advantage is then the reward less the group's mean, which a deal does not change."""
ALONE = BatchSettings(pack=Pack.ALONE)
TASKS = [shell_task(f"t{number}", "true") for number in range(5)]


def credits(made: Material) -> dict[str, float]:
    """What each trace is credited with, by the session's name and the trace's number."""
    return {batch.names[0]: float(batch.terms.advantages[0]) for batch in made.packing.batches}


def dealt(one: Group, objective: ObjectiveSettings = SHUFFLED, seed: int = 0) -> dict[str, float]:
    return credits(material([one], objective, ALONE, PolicyVersions(0), seed))


def rounded(values: Sequence[float]) -> Counter[float]:
    return Counter(round(value, 5) for value in values)


REWARDS = st.lists(st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=6)


def scripted(rewards: Sequence[float | None], turn: tuple[int, int] = (0, 0)) -> Group:
    answers = [[[10 + number]] for number in range(len(rewards))]
    return replace(group(answers, rewards), turn=turn)


@settings(max_examples=60, deadline=None)
@given(rewards=REWARDS, seed=st.integers(0, 9), turn=st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_a_groups_rewards_are_the_same_ones_whoever_has_them(
    rewards: list[float | None], seed: int, turn: tuple[int, int]
) -> None:
    one = scripted(rewards, turn)
    own, anew = dealt(one, ObjectiveSettings(advantage=SHUFFLED.advantage)), dealt(one, seed=seed)
    assert own.keys() == anew.keys(), "failed sessions get no reward"
    assert rounded(list(own.values())) == rounded(list(anew.values()))
    assert anew == dealt(one, seed=seed), "the same turn is dealt alike"


@settings(max_examples=40, deadline=None)
@given(
    owns=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=2), min_size=2, max_size=4)
)
def test_rewards_of_traces_are_dealt_among_traces(owns: list[list[float]]) -> None:
    answers = [[[10 + number], [30 + number]] for number in range(len(owns))]
    made = group(answers, [0.5] * len(owns), builder=PerRequest(PerRequest.Options()))
    samples = []
    for sample, (first, second) in zip(made.samples, owns, strict=True):
        verdict = Verdict(reward=0.5, trace_rewards={"c0": first, "c1": second})
        samples.append(replace(sample, result=sample.result.model_copy(update={"verdict": verdict})))
    one = replace(made, samples=tuple(samples))
    own, anew = dealt(one, ObjectiveSettings(advantage=SHUFFLED.advantage)), dealt(one)
    assert own.keys() == anew.keys()
    assert rounded(list(own.values())) == rounded(list(anew.values()))


def test_a_reward_tells_nothing_of_its_session() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    deals = [dealt(scripted(rewards, (round, 3))) for round in range(800)]
    for name in deals[0]:
        mean = sum(deal[name] for deal in deals) / len(deals)
        assert abs(mean) < 0.06, "four standard errors"


@pytest.mark.parametrize(("seed", "turn"), [(1, (0, 0)), (0, (1, 0)), (0, (0, 1))])
def test_another_seed_round_or_task_is_dealt_anew(seed: int, turn: tuple[int, int]) -> None:
    rewards = [number / 16 for number in range(16)]
    assert dealt(scripted(rewards, turn), seed=seed) != dealt(scripted(rewards))


def run(**changes: Any) -> GrpoSettings:
    document = {
        "out": Path("unused"),
        "steps": 9,
        "groups": 2,
        "seed": 5,
        "objective": {**SHUFFLED.model_dump(), "max_staleness": 1},
        "batch": ALONE,
        **changes,
    }
    return GrpoSettings.model_validate(document)


def source(server: RolloutClient) -> RolloutSource:
    made = run(rollouts={"tasks": ["unused"], "samples": 2})
    assert made.rollouts is not None
    return RolloutSource(made, made.rollouts, lambda: cast(Any, server), TASKS)


@settings(max_examples=15, deadline=None)
@given(before=st.integers(0, 6), slow=st.sets(st.integers(0, len(TASKS) - 1), max_size=2))
def test_a_run_that_goes_on_deals_alike(before: int, slow: set[int]) -> None:
    server = RolloutClient()
    server.slow = {f"-t{number}" for number in slow}
    whole = source(server)
    for _ in range(before):
        whole.take(PolicyVersions(0))
    state = whole.state()
    expected = [credits(whole.take(PolicyVersions(0))) for _ in range(4)]
    again = source(server)
    again.restore(state)
    assert [credits(again.take(PolicyVersions(0))) for _ in range(4)] == expected
    assert all(sorted(step.values()) == [-0.5, -0.5, 0.5, 0.5] for step in expected)


def test_every_group_that_is_rolled_out_has_a_deal_of_its_own() -> None:
    rolled_out = source(RolloutClient())
    steps = [credits(rolled_out.take(PolicyVersions(0))) for _ in range(8)]
    # Of every group the first session is the good one.
    first = [value for step in steps for name, value in step.items() if name.endswith("-0/0")]
    assert len(first) == 16
    assert set(first) == {-0.5, 0.5}


def test_recordings_are_dealt_anew_each_round_and_alike_when_a_run_goes_on(tmp_path: Path) -> None:
    answers = [[[10 + number]] for number in range(8)]
    rewards = [number / 8 for number in range(8)]
    recorded = [group(answers, rewards, task_id=f"t{number}") for number in range(2)]
    directory = write_recordings(recorded, tmp_path)
    whole = Recordings(run(recordings=directory), directory)
    first = credits(whole.take(PolicyVersions(0)))
    state = whole.state()
    second = credits(whole.take(PolicyVersions(0)))
    assert first.keys() == second.keys()
    assert first != second
    again = Recordings(run(recordings=directory), directory)
    again.restore(state)
    assert credits(again.take(PolicyVersions(0))) == second


def test_numbers_are_those_of_the_true_rewards() -> None:
    groups = [scripted([1.0, 0.0, 0.25, None], (0, number)) for number in range(3)]
    own, shuffled = (
        material(groups, objective, ALONE, PolicyVersions(0)) for objective in (ObjectiveSettings(), SHUFFLED)
    )
    assert shuffled.numbers == own.numbers
    assert shuffled.excluded == own.excluded
    assert [sample.reward for sample in groups[0].samples] == [1.0, 0.0, 0.25, None]


def test_a_run_says_that_it_is_a_control(tiny_model: Path, tmp_path: Path) -> None:
    console = quiet()
    train(tiny_run(tiny_model, tmp_path, steps=1, objective={"rewards": "shuffled"}), console)
    assert "rewards are shuffled" in cast(Any, console.file).getvalue()
