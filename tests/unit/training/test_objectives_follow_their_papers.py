"""Each objective is its paper's formula, here written out in float64 and differentiated by differences."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

from polar.training.material import Material, PolicyVersions, material
from polar.training.objective import Measured, policy_loss
from polar.training.settings import (
    BatchSettings,
    KlEstimator,
    KlPlace,
    Level,
    ObjectiveName,
    ObjectiveSettings,
    OldPolicy,
    Outliers,
    Pack,
    Surrogate,
    TeacherSettings,
    Unit,
)
from polar.trajectory.base import Builder
from polar.trajectory.learnable import Advantage, Group
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.scripted_rollouts import group

Array = NDArray[np.float64]
RECORDED = -2.0
TEACHER = TeacherSettings(url="http://127.0.0.1:1")
MERGED, APART = PrefixMerging(PrefixMerging.Options()), PerRequest(PerRequest.Options())
ANSWERS = (
    ([[10, 11, 12], [13, 14], [15]], [[10, 11, 20], [21]], [[30, 31], [32, 33, 34], [35]]),
    ([[10, 12]], [[40, 41, 42, 43, 44]], [[45], [46]]),
)
REWARDS = ((1.0, 0.0, 0.4), (0.0, 1.0, 1.0))


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence, with the logprobs of its tokens under each policy."""

    reward: float
    now: Array
    old: Array
    reference: Array

    @property
    def recorded(self) -> Array:
        return np.full(len(self.now), RECORDED)


Policies = Callable[[str, int], dict[str, Array]]
Groups = list[list[Sampled]]


def policies(name: str, count: int) -> dict[str, Array]:
    """Logprobs of a trace's tokens, far enough apart that everything is clipped somewhere."""
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    old = RECORDED + chance.normal(0, 0.8, count)
    return {
        "old": old,
        "now": old + chance.normal(0, 0.4, count),
        "reference": old + chance.normal(0, 0.5, count),
    }


def at_once(name: str, count: int) -> dict[str, Array]:
    """The first update: nothing has moved."""
    found = policies(name, count)
    return found | {"now": found["old"]}


def as_recorded(name: str, count: int) -> dict[str, Array]:
    """The trainer agreed with the engine before the step, and has moved by a few ten thousandths since."""
    old = np.full(count, RECORDED)
    chance = np.random.default_rng(zlib.crc32(name.encode()))
    moved = chance.normal(chance.choice([-4e-4, 4e-4]), 1e-4, count)
    return {"old": old, "now": old + moved, "reference": old}


def rollouts(builder: Builder = MERGED) -> list[Group]:
    return [
        group(answers, rewards, task_id=f"t{at}", prompt=(1, 2, at), builder=builder, logprob=RECORDED)
        for at, (answers, rewards) in enumerate(zip(ANSWERS, REWARDS, strict=True))
    ]


def sequences(values: Policies) -> Groups:
    return [
        [
            Sampled(reward, **values(f"t{at}-{number}/0", sum(map(len, answer))))
            for number, (answer, reward) in enumerate(zip(answers, rewards, strict=True))
        ]
        for at, (answers, rewards) in enumerate(zip(ANSWERS, REWARDS, strict=True))
    ]


def computed(
    made: Material, objective: ObjectiveSettings, values: Policies
) -> tuple[float, dict[str, Array]]:
    """The trainer's loss, and its gradient by the logprobs of each trace."""
    total = 0.0
    slopes: dict[str, Array] = {}
    for batch in made.packing.batches:
        rows = [values(name, int((batch.terms.rows == at).sum())) for at, name in enumerate(batch.names)]
        joined = {name: torch.tensor(np.concatenate([row[name] for row in rows])) for name in rows[0]}
        now = joined["now"].requires_grad_()
        measured = Measured(
            now, torch.zeros_like(now), joined["old"], joined["reference"] if objective.kl else None
        )
        loss = policy_loss(batch, measured, objective)
        loss.value.backward()
        assert now.grad is not None
        total += float(loss.value.detach())
        lengths = np.cumsum([len(row["now"]) for row in rows])[:-1]
        slopes |= dict(zip(batch.names, np.split(now.grad.numpy(), lengths), strict=True))
    return total, slopes


def stepped(objective: ObjectiveSettings, builder: Builder = MERGED, **batch: Any) -> Material:
    return material(rollouts(builder), objective, BatchSettings(**batch), PolicyVersions(0))


Loss = Callable[[Groups, Groups], float]
"""The loss of sequences; of the second ones nothing is differentiated."""


def differentiated(loss: Loss, groups: Groups, step: float = 1e-6) -> dict[str, Array]:
    def at(group: int, number: int, place: int, by: float) -> float:
        one = groups[group][number]
        moved = replace(one, now=one.now + by * (np.arange(len(one.now)) == place))
        others = [[*sequences] for sequences in groups]
        others[group][number] = moved
        return loss(others, groups)

    return {
        f"t{g}-{n}/0": np.array(
            [(at(g, n, t, step) - at(g, n, t, -step)) / (2 * step) for t in range(len(one.now))]
        )
        for g, found in enumerate(groups)
        for n, one in enumerate(found)
    }


def truncated(one: Sampled) -> Array:
    return np.minimum(np.exp(one.old - one.recorded), 2.0)


def each(groups: Groups) -> list[tuple[Sampled, Array]]:
    """Every sequence with the rewards of its group."""
    return [(one, np.array([other.reward for other in found])) for found in groups for one in found]


def ppo(one: Sampled, advantage: Array | float, low: float, high: float) -> Array:
    ratio = np.exp(one.now - one.old)
    return np.minimum(ratio * advantage, np.clip(ratio, 1 - low, 1 + high) * advantage)


def grpo(groups: Groups, _: Groups) -> float:
    """Shao et al. 2024, with rewards of outcomes."""
    terms = [
        (truncated(one) * ppo(one, (one.reward - rewards.mean()) / rewards.std(), 0.2, 0.2)).mean()
        for one, rewards in each(groups)
    ]
    return -float(np.mean(terms))


def dr_grpo(groups: Groups, _: Groups) -> float:
    """Liu et al. 2025, without the length's and the deviation's division."""
    terms = [
        (truncated(one) * ppo(one, one.reward - rewards.mean(), 0.2, 0.2)).sum() / 4096
        for one, rewards in each(groups)
    ]
    return -float(np.mean(terms))


def dapo(groups: Groups, _: Groups) -> float:
    """Yu et al. 2025."""
    terms = [
        truncated(one) * ppo(one, (one.reward - rewards.mean()) / rewards.std(), 0.2, 0.28)
        for one, rewards in each(groups)
    ]
    return -float(np.concatenate(terms).mean())


def rloo(groups: Groups, _: Groups) -> float:
    """Ahmadian et al. 2024: REINFORCE with the mean of the others as baseline, per `session_tokens`."""
    terms = [
        (one.reward - (rewards.sum() - one.reward) / (len(rewards) - 1)) * (truncated(one) * one.now).sum()
        for one, rewards in each(groups)
    ]
    return -float(np.mean(terms)) / 4096


def gspo(groups: Groups, _: Groups) -> float:
    """Zheng et al. 2025: the ratio of sequences, to the power of one over their length."""
    terms = []
    for one, rewards in each(groups):
        ratio = np.exp((one.now.sum() - one.old.sum()) / len(one.now))
        advantage = (one.reward - rewards.mean()) / rewards.std()
        terms.append(min(ratio * advantage, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantage))
    return -float(np.mean(terms))


def cispo(groups: Groups, constant: Groups) -> float:
    """MiniMax 2025, with the bound of Khatri et al. 2025."""
    terms = []
    for (one, rewards), (fixed, _) in zip(each(groups), each(constant), strict=True):
        weight = np.minimum(np.exp(fixed.now - fixed.old), 5.0) * truncated(one)
        terms.append(weight * (one.reward - rewards.mean()) / rewards.std() * one.now)
    return -float(np.concatenate(terms).mean())


def distill(groups: Groups, _: Groups) -> float:
    """Policy gradient on the reverse KL divergence of each token."""
    terms = [
        truncated(one) * np.exp(one.now - one.old) * (one.reference - one.old) for one, _ in each(groups)
    ]
    return -float(np.concatenate(terms).mean())


PAPERS: dict[ObjectiveName, tuple[Loss, Policies]] = {
    ObjectiveName.GRPO: (grpo, policies),
    ObjectiveName.DR_GRPO: (dr_grpo, policies),
    ObjectiveName.RLOO: (rloo, at_once),
    ObjectiveName.DAPO: (dapo, policies),
    ObjectiveName.GSPO: (gspo, as_recorded),
    ObjectiveName.CISPO: (cispo, policies),
    ObjectiveName.DISTILL: (distill, policies),
}


def named(name: ObjectiveName, **parts: Any) -> ObjectiveSettings:
    return ObjectiveSettings(name=name, teacher=TEACHER if name is ObjectiveName.DISTILL else None, **parts)


def assert_same(found: dict[str, Array], expected: dict[str, Array]) -> None:
    largest = max(np.abs(one).max() for one in expected.values())
    assert largest > 0
    assert found.keys() == expected.keys()
    for name, slopes in found.items():
        # Terms' weights and advantages are kept in single precision.
        assert slopes == pytest.approx(expected[name], abs=2e-6 * largest), name


@pytest.mark.parametrize("name", ObjectiveName)
def test_a_preset_is_its_papers_objective(name: ObjectiveName) -> None:
    loss, values = PAPERS[name]
    objective = named(name)
    found, slopes = computed(stepped(objective), objective, values)
    groups = sequences(values)
    assert_same(slopes, differentiated(loss, groups))
    if name is not ObjectiveName.RLOO:
        # A ratio times the advantage has REINFORCE's gradient, and another value.
        assert found == pytest.approx(loss(groups, groups), rel=1e-5)


@pytest.mark.parametrize(
    "name", [ObjectiveName.GRPO, ObjectiveName.DAPO, ObjectiveName.CISPO, ObjectiveName.GSPO]
)
def test_clipping_acts_in_what_is_compared(name: ObjectiveName) -> None:
    objective, (_, values) = named(name), PAPERS[name]
    made = stepped(objective, pack=Pack.ALONE)
    clipped = [slopes for slopes in computed(made, objective, values)[1].values() if not slopes.all()]
    assert bool(clipped) == (name is not ObjectiveName.CISPO)


def importances(one: Sampled, objective: ObjectiveSettings) -> Array:
    """IcePop and masked importance sampling, or truncation, of tokens or of whole sequences."""
    ratio = np.exp(one.old - one.recorded)
    if objective.importance is Unit.TRACE:
        ratio = np.full(len(ratio), ratio.prod())
    least, most = objective.min_importance, objective.max_importance
    if objective.outliers is Outliers.MASK:
        return np.where((ratio >= least) & (ratio <= most), ratio, 0.0)
    return np.clip(ratio, least, most)


@pytest.mark.parametrize("unit", Unit)
@pytest.mark.parametrize("outliers", Outliers)
@pytest.mark.parametrize(("least", "most"), [(0.0, 2.0), (0.5, 5.0)])
def test_importance_is_truncated_or_masked_by_token_or_trace(
    unit: Unit, outliers: Outliers, least: float, most: float
) -> None:
    objective = ObjectiveSettings(
        importance=unit, outliers=outliers, min_importance=least, max_importance=most
    )

    def loss(groups: Groups, _: Groups) -> float:
        terms = [
            importances(one, objective) * ppo(one, (one.reward - rewards.mean()) / rewards.std(), 0.2, 0.28)
            for one, rewards in each(groups)
        ]
        return -float(np.concatenate(terms).mean())

    found, slopes = computed(stepped(objective), objective, policies)
    assert found == pytest.approx(loss(sequences(policies), []), rel=1e-5)
    assert_same(slopes, differentiated(loss, sequences(policies)))


@pytest.mark.parametrize("name", [ObjectiveName.DAPO, ObjectiveName.CISPO, ObjectiveName.GSPO])
def test_the_old_policy_may_be_the_one_that_sampled(name: ObjectiveName) -> None:
    """As the papers have it: there is nothing else to correct."""

    def sampled(name: str, count: int) -> dict[str, Array]:
        found = policies(name, count)
        return found | {"old": np.full(count, RECORDED)}

    objective = named(name, old=OldPolicy.RECORDED)
    # The trainer's policy before the step has no part in it.
    found, slopes = computed(stepped(objective), objective, policies)
    loss, groups = PAPERS[name][0], sequences(sampled)
    assert found == pytest.approx(loss(groups, groups), rel=1e-5)
    assert_same(slopes, differentiated(loss, groups))


@pytest.mark.parametrize("unit", Unit)
def test_masked_tokens_are_counted(unit: Unit) -> None:
    objective = ObjectiveSettings(importance=unit, outliers=Outliers.MASK, min_importance=0.5)
    made = stepped(objective)
    (batch,) = made.packing.batches
    rows = [policies(name, int((batch.terms.rows == at).sum())) for at, name in enumerate(batch.names)]
    old = torch.tensor(np.concatenate([row["old"] for row in rows]))
    loss = policy_loss(batch, Measured(old, torch.zeros_like(old)), objective)
    expected = sum(int((importances(one, objective) == 0).sum()) for one, _ in each(sequences(policies)))
    assert 0 < expected < len(old)
    assert int(loss.sums["masked_fraction"]) == expected


ESTIMATORS: dict[KlEstimator, Callable[[Array], Array]] = {
    KlEstimator.K1: lambda apart: apart,
    KlEstimator.K2: lambda apart: apart**2 / 2,
    KlEstimator.K3: lambda apart: np.exp(-apart) - 1 + apart,
}


@pytest.mark.parametrize("place", KlPlace)
@pytest.mark.parametrize("kind", KlEstimator)
def test_the_kl_divergence_enters_where_it_is_asked_to(place: KlPlace, kind: KlEstimator) -> None:
    parts = {"kl": 0.3, "kl_in": place, "kl_estimator": kind}
    if place is KlPlace.LOSS and kind is KlEstimator.K1:
        with pytest.raises(ValidationError, match="k2 has that of KL"):
            ObjectiveSettings.model_validate(parts)
        return
    objective = ObjectiveSettings.model_validate(parts)

    def loss(groups: Groups, _: Groups) -> float:
        terms = []
        for one, rewards in each(groups):
            advantage = np.full(len(one.now), (one.reward - rewards.mean()) / rewards.std())
            taken = 0.3 * ESTIMATORS[kind](one.old - one.reference)
            if place is KlPlace.REWARD:
                taken = np.array([taken[at:].sum() for at in range(len(taken))])
            if place is not KlPlace.LOSS:
                advantage -= taken
            term = truncated(one) * ppo(one, advantage, 0.2, 0.28)
            if place is KlPlace.LOSS:
                term -= 0.3 * ESTIMATORS[kind](one.now - one.reference)
            terms.append(term)
        return -float(np.concatenate(terms).mean())

    found, slopes = computed(stepped(objective), objective, policies)
    assert found == pytest.approx(loss(sequences(policies), []), rel=1e-5)
    assert_same(slopes, differentiated(loss, sequences(policies)))


def test_a_token_that_the_reference_has_not_scored_is_not_penalised() -> None:
    def unscored(name: str, count: int) -> dict[str, Array]:
        found = policies(name, count)
        return found | {"reference": np.where(np.arange(count) % 2, np.nan, found["reference"])}

    objective = named(ObjectiveName.DISTILL)
    _, slopes = computed(stepped(objective), objective, unscored)
    for found in slopes.values():
        assert not found[1::2].any()
        assert np.isfinite(found).all()
        assert found[::2].all()


def test_the_divergence_that_is_told_is_the_mean_over_scored_tokens() -> None:
    objective = named(ObjectiveName.DISTILL)
    (batch,) = stepped(objective).packing.batches
    now = torch.full((len(batch.terms),), RECORDED, dtype=torch.float64)
    is_scored = torch.arange(len(now)) % 3 == 0
    reference = torch.where(is_scored, now - 1, np.nan)
    loss = policy_loss(batch, Measured(now, torch.zeros_like(now), reference=reference), objective)
    total, count = loss.partial_sums["kl"].tolist()
    assert count == int(is_scored.sum()) < len(now)
    assert total / count == pytest.approx(np.exp(-1.0))


def test_the_sequence_of_a_ratio_is_the_trace() -> None:
    """A session of several traces has several ratios; each token still weighs the same in its sample."""
    objective = ObjectiveSettings(name=ObjectiveName.GSPO, clip_low=0.1, clip_high=0.1)
    _, slopes = computed(stepped(objective, APART), objective, policies)
    samples = sum(map(len, REWARDS))
    for at, (answers, given_rewards) in enumerate(zip(ANSWERS, REWARDS, strict=True)):
        rewards = np.array(given_rewards)
        for number, answer in enumerate(answers):
            advantage = (rewards[number] - rewards.mean()) / rewards.std()
            for call, tokens in enumerate(answer):
                name = f"t{at}-{number}/{call}"
                one = policies(name, len(tokens))
                ratio = np.exp((one["now"] - one["old"]).mean())
                is_clipped = (ratio > 1.1) if advantage > 0 else (ratio < 0.9)
                weight = np.minimum(np.exp(one["old"] - RECORDED), 2.0) / (sum(map(len, answer)) * samples)
                expected = np.zeros(len(tokens)) if is_clipped else -weight * ratio * advantage
                assert slopes[name] == pytest.approx(expected, rel=1e-5, abs=1e-9)


PARTS = st.fixed_dictionaries(
    {
        "advantage": st.sampled_from([one for one in Advantage if one is not Advantage.NONE]),
        "level": st.sampled_from(Level),
        "surrogate": st.sampled_from(Surrogate),
        "old": st.sampled_from(OldPolicy),
        "ratio": st.sampled_from(Unit),
        "importance": st.sampled_from(Unit),
        "outliers": st.sampled_from(Outliers),
        "kl_in": st.sampled_from(KlPlace),
        "kl": st.sampled_from([0.0, 0.3]),
    }
)


@settings(max_examples=60, deadline=None)
@given(parts=PARTS, builder=st.sampled_from([MERGED, APART]), budget=st.sampled_from([24, 40, 1000]))
def test_no_layout_changes_what_a_token_learns(parts: dict[str, Any], builder: Builder, budget: int) -> None:
    objective = ObjectiveSettings.model_validate(parts)
    one = partial(computed, objective=objective, values=policies)
    expected_loss, expected = one(stepped(objective, builder, pack=Pack.ALONE))
    for pack in (Pack.TREE, Pack.SEQUENCE):
        loss, slopes = one(stepped(objective, builder, pack=pack, tokens=budget))
        assert loss == pytest.approx(expected_loss, rel=1e-9)
        assert_same(slopes, expected)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(ObjectiveName), parts=PARTS)
def test_a_preset_is_its_parts_and_what_is_set_overrides_them(
    name: ObjectiveName, parts: dict[str, Any]
) -> None:
    whole = named(name)
    plain = ObjectiveSettings.model_validate(
        {**{field: getattr(whole, field) for field in type(whole).model_fields}, "name": ObjectiveName.DAPO}
    )
    assert whole.model_copy(update={"name": ObjectiveName.DAPO}) == plain
    if parts["kl"] == 0 and name is ObjectiveName.DISTILL:
        return
    changed = named(name, **parts)
    assert {field: getattr(changed, field) for field in parts} == parts
    others = [field for field in type(whole).model_fields if field not in parts]
    assert [getattr(changed, field) for field in others] == [getattr(whole, field) for field in others]
    marked = {said.split()[0] for said in changed.summary.split(": ")[1].split(", ") if "(set)" in said}
    expected = {field for field, value in parts.items() if value != getattr(whole, field)}
    assert marked == (expected if parts["kl"] else expected - {"kl_in"})


@pytest.mark.parametrize("name", [one for one in ObjectiveName if one is not ObjectiveName.DISTILL])
def test_groups_with_equal_rewards_teach_nothing(name: ObjectiveName) -> None:
    objective = named(name, kl=0.5)
    equal = [group(answers, (0.5, 0.5, 0.5)) for answers in ANSWERS]
    assert not material(equal, objective, BatchSettings(), PolicyVersions(0)).packing.batches


def test_a_teacher_teaches_whatever_rewards_are() -> None:
    objective = named(ObjectiveName.DISTILL)
    equal, one = group(ANSWERS[0], (0.5, 0.5, 0.5)), group(ANSWERS[0], (0.0, 1.0, 0.0))
    unscored = tuple(
        replace(session, result=session.result.model_copy(update={"verdict": None}))
        for session in one.samples
    )
    for rolled_out in (equal, one, replace(one, samples=unscored)):
        made = material([rolled_out], objective, BatchSettings(), PolicyVersions(0))
        (batch,) = made.packing.batches
        assert len(batch.terms) == sum(len(tokens) for answer in ANSWERS[0] for tokens in answer)
        assert not batch.terms.advantages.any()
        assert not made.excluded.total()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"name": "distill"}, "needs a 'teacher'"),
        ({"advantage": "none"}, "'kl' is 0"),
        ({"teacher": {"url": "http://x"}}, "no effect while 'kl' is 0"),
        ({"name": "distill", "teacher": {"url": "http://x"}, "temperature": 0.7}, "needs 'temperature: 1'"),
        ({"name": "ppo"}, "name"),
        ({"max_importance": 0.5}, "greater than or equal to 1"),
        ({"min_importance": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ObjectiveSettings.model_validate(parts)
