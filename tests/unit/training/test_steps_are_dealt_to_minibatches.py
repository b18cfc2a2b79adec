"""A step's groups may be dealt to several updates: each has its own, and all look back at one old policy."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from polar.training.learner import Learner
from polar.training.material import Material, PolicyVersions, material
from polar.training.objective import Measured, policy_loss
from polar.training.policy import load_policy
from polar.training.settings import (
    BatchSettings,
    DivergenceLimits,
    GrpoSettings,
    Level,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
)
from polar.trajectory.learnable import Group
from tests.fakes.scripted_rollouts import group
from tests.fakes.training_runs import groups

LR = 0.01


def dealt(given: list[Group], count: int, level: Level = Level.TOKEN) -> Material:
    objective = ObjectiveSettings(level=level, session_tokens=10)
    return material(given, objective, BatchSettings(), PolicyVersions(0), minibatches=count)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=7),
    equal=st.sets(st.integers(0, 6)),
    count=st.integers(1, 7),
    level=st.sampled_from(Level),
)
def test_every_group_is_in_one_minibatch_and_each_is_a_step_of_its_own(
    lengths: list[int], equal: set[int], count: int, level: Level
) -> None:
    rolled_out = [
        group(([[10] * length], [[20]]), (1.0, float(number in equal)), task_id=f"t{number}")
        for number, length in enumerate(lengths)
    ]
    made = dealt(rolled_out, count, level)
    teaching = {f"t{number}" for number in range(len(lengths)) if number not in equal}
    found = [
        {name.rpartition("-")[0] for batch in one.batches for name in batch.names} for one in made.minibatches
    ]
    assert len(found) == max(1, min(count, len(teaching)))
    assert sorted(name for names in found for name in names) == sorted(teaching)
    assert max(map(len, found)) - min(map(len, found)) <= 1
    weights = [float(sum(batch.terms.weights.sum() for batch in one.batches)) for one in made.minibatches]
    if level is not Level.CONSTANT and teaching:
        assert weights == pytest.approx([1.0] * len(weights))
    if level is Level.CONSTANT:
        (whole,) = dealt(rolled_out, 1, level).minibatches
        together = sum(float(batch.terms.weights.sum()) for batch in whole.batches)
        assert sum(weights) == pytest.approx(together * count)


@pytest.mark.parametrize("updates", [1, 2])
def test_each_minibatch_makes_an_update_and_the_old_policy_is_that_before_the_step(
    tiny_model: Path, updates: int
) -> None:
    made, objective = dealt(groups(3), 3), ObjectiveSettings()
    model = ModelSettings(name=str(tiny_model), device="cpu")
    ours, theirs = load_policy(model), load_policy(model)
    loss = partial(policy_loss, settings=objective)
    optimizer = OptimizerSettings(lr=LR, updates=updates)
    numbers = Learner(ours, loss, optimizer, DivergenceLimits(behaviour_kl=None), steps=1).learn(made)

    batches = [batch for one in made.minibatches for batch in one.batches]
    olds = [theirs.logprobs(batch) for batch in batches]
    plain = torch.optim.AdamW(theirs.parameters, lr=LR, betas=(0.9, 0.999), weight_decay=0.0)
    clipped = []
    for at, (batch, old) in enumerate(updates * list(zip(batches, olds, strict=True))):
        found = policy_loss(batch, Measured(*theirs.measure(batch), old), objective)
        found.value.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters, 1.0)
        plain.step()
        plain.zero_grad()
        if at >= (updates - 1) * len(batches):
            clipped.append(float(found.sums["clip_fraction"]) / len(batch.terms))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters, theirs.parameters, strict=True))
    assert clipped[0] == 0 or updates > 1
    assert any(clipped)
    assert numbers["clip_fraction"] == pytest.approx(sum(clipped) / len(clipped))


def test_more_minibatches_than_groups_are_refused() -> None:
    with pytest.raises(ValidationError, match="2 groups cannot be dealt to 3 minibatches"):
        GrpoSettings.model_validate(
            {"out": "o", "steps": 1, "recordings": "r", "groups": 2, "minibatches": 3}
        )
