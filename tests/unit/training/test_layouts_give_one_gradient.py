"""However a session is cut into traces and traces into batches, the trainer computes the same gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from polar.training.material import Material, PolicyVersions, material
from polar.training.objective import Measured, policy_loss
from polar.training.policy import TrainerPolicy, load_policy
from polar.training.settings import (
    BatchSettings,
    KlPlace,
    Level,
    ModelSettings,
    ObjectiveName,
    ObjectiveSettings,
    Pack,
    Unit,
)
from polar.trajectory.base import Builder
from polar.trajectory.learnable import Advantage, Group
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.scripted_rollouts import group, replayed, sample, turns

TOLERANCE = 1e-4
ANSWERS = (
    [[10, 11, 12], [13, 14], [15, 16, 17, 18]],
    [[10, 11, 20], [21]],
    [[30, 31], [32, 33, 34], [35], [36, 37]],
)
REWARDS = (1.0, 0.0, 0.4)
MERGED, APART = PrefixMerging(PrefixMerging.Options()), PerRequest(PerRequest.Options())


def rollouts(builder: Builder) -> list[Group]:
    other = group(ANSWERS[::-1], REWARDS, task_id="other", prompt=(1, 2, 4), builder=builder, logprob=-5.0)
    return [group(ANSWERS, REWARDS, builder=builder, logprob=-5.0), other, branched(builder)]


def branched(builder: Builder) -> Group:
    """Two samples, one of which is left by a branch after its first call."""
    said = partial(turns, (1, 2, 5), logprob=-5.0)
    first, second = said(ANSWERS[0], name="a"), said(ANSWERS[2], name="b")
    branch = said([[40, 41]], name="c", before=replayed(first[:1]))
    samples = (
        sample(path, reward, task_id="branched", number=number, builder=builder)
        for number, (path, reward) in enumerate(zip((first, second, branch), REWARDS, strict=True))
    )
    return Group("branched", tuple(samples))


def gradient(policy: TrainerPolicy, made: Material, objective: ObjectiveSettings) -> tuple[float, list[Any]]:
    """Of a second update: the policy has moved, so that ratios are not 1 and clipping acts."""
    policy.model.zero_grad()
    total, clipped = 0.0, 0.0
    for batch in made.packing.batches:
        logprobs, entropy = policy.measure(batch)
        # As if the policy had moved by an amount that depends on nothing but the token.
        old = logprobs.detach() + (torch.as_tensor(batch.labels) % 5 - 2) * 0.2
        reference = logprobs.detach() - 0.3
        loss = policy_loss(batch, Measured(logprobs, entropy, old, reference), objective)
        loss.value.backward()
        total += float(loss.value.detach())
        clipped += float(loss.sums["clip_fraction"])
    assert clipped > 0
    return total, [parameter.grad.clone() for parameter in policy.parameters]


def apart(
    policy: TrainerPolicy, objective: ObjectiveSettings, builders: tuple[Builder, ...] = (APART, MERGED)
) -> float:
    """How far the layouts' losses and gradients are from each other, of the largest."""
    found = [
        gradient(
            policy,
            material(
                rollouts(builder), objective, BatchSettings(tokens=budget, pack=pack), PolicyVersions(0)
            ),
            objective,
        )
        for builder in builders
        for pack in Pack
        for budget in (40, 10_000)
    ]
    loss, expected = found[0]
    largest = max(float(one.abs().max()) for one in expected)
    assert largest > 1e-4
    return max(
        max(
            abs(other_loss / loss - 1),
            max(float((a - b).abs().max()) for a, b in zip(expected, other, strict=True)) / largest,
        )
        for other_loss, other in found
    )


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> TrainerPolicy:
    return load_policy(ModelSettings(name=str(tiny_model), device="cpu", chunk=5))


@pytest.mark.parametrize("advantage", [one for one in Advantage if one is not Advantage.NONE])
@pytest.mark.parametrize("level", Level)
def test_per_request_merged_and_tree_packed_gradients_are_equal(
    policy: TrainerPolicy, level: Level, advantage: Advantage
) -> None:
    objective = ObjectiveSettings(level=level, advantage=advantage, kl=0.1, entropy=0.01)
    assert apart(policy, objective) <= TOLERANCE


@pytest.mark.parametrize("builder", [APART, MERGED], ids=["apart", "merged"])
@pytest.mark.parametrize(
    "objective",
    [
        # Ratios of traces are close to 1 here.
        ObjectiveSettings(name=ObjectiveName.GSPO, clip_low=0.01, clip_high=0.01, importance=Unit.TRACE),
        ObjectiveSettings(name=ObjectiveName.CISPO, clip_high=0.28, kl=0.1, kl_in=KlPlace.REWARD),
    ],
    ids=["gspo", "cispo"],
)
def test_what_is_of_a_trace_is_the_same_however_traces_are_packed(
    policy: TrainerPolicy, objective: ObjectiveSettings, builder: Builder
) -> None:
    assert apart(policy, objective, (builder,)) <= TOLERANCE


@pytest.mark.parametrize("model", ["tiny_model", "tiny_hybrid"])
def test_in_double_precision_they_are_one(model: str, request: pytest.FixtureRequest) -> None:
    """What is left is the single precision in which the terms' weights are kept."""
    name = str(request.getfixturevalue(model))
    policy = load_policy(ModelSettings(name=name, device="cpu", chunk=5, precision="float64"))
    assert apart(policy, ObjectiveSettings(kl=0.1, entropy=0.01)) <= 1e-6


def test_merged_traces_train_the_tokens_of_per_request_ones(policy: TrainerPolicy) -> None:
    sizes = {
        name: material(
            rollouts(builder), ObjectiveSettings(), BatchSettings(tokens=10_000), PolicyVersions(0)
        ).packing
        for name, builder in (("merged", MERGED), ("apart", APART))
    }
    trained = {name: sum(len(batch.terms) for batch in made.batches) for name, made in sizes.items()}
    whole = [sum(map(len, one)) for one in ANSWERS]
    assert trained["merged"] == trained["apart"] == 2 * sum(whole) + whole[0] + whole[2] + 2
    assert sizes["merged"].stats.row_tokens < sizes["apart"].stats.row_tokens


def test_chunks_change_nothing(tiny_model: Path, policy: TrainerPolicy) -> None:
    whole = load_policy(ModelSettings(name=str(tiny_model), device="cpu", chunk=100_000))
    made = material(rollouts(MERGED), ObjectiveSettings(), BatchSettings(), versions=PolicyVersions(0))
    (batch,) = made.packing.batches
    for ours, theirs in zip(policy.measure(batch), whole.measure(batch), strict=True):
        assert float((ours - theirs).detach().abs().max()) <= 1e-5


def test_gradient_checkpointing_changes_nothing(tiny_model: Path, policy: TrainerPolicy) -> None:
    frugal = load_policy(ModelSettings(name=str(tiny_model), device="cpu", gradient_checkpointing=True))
    objective = ObjectiveSettings()
    made = material(rollouts(MERGED), objective, BatchSettings(), versions=PolicyVersions(0))
    one, other = gradient(policy, made, objective)[1], gradient(frugal, made, objective)[1]
    assert max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True)) <= 1e-5


def test_logprobs_are_those_of_the_plain_model(policy: TrainerPolicy) -> None:
    made = material(
        [group(ANSWERS, REWARDS)], ObjectiveSettings(), BatchSettings(), versions=PolicyVersions(0)
    )
    (batch,) = made.packing.batches
    at = batch.names.index("task-0/0")
    ours = policy.logprobs(batch)[torch.as_tensor(batch.terms.rows == at)]
    ids = [1, 2, 3, *ANSWERS[0][0], 7, 8, *ANSWERS[0][1], 7, 8, *ANSWERS[0][2]]
    logits = policy.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    expected = [logits[place - 1, ids[place]] for place in (3, 4, 5, 8, 9, 12, 13, 14, 15)]
    assert float((ours - torch.stack(expected)).detach().abs().max()) <= 1e-4
