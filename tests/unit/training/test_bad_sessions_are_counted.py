"""What cannot be learnt from is left out and counted by name; the rest is learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.models.chat import Sampling
from polar.training.material import Material, PolicyVersions, material
from polar.training.settings import BatchSettings, GrpoSettings, Level, ObjectiveSettings, Pack, TooLong
from polar.training.sources import Recordings
from polar.trajectory.accounting import LOGPROB_TOLERANCE
from polar.trajectory.learnable import Advantage, Baseline, EndedSession, Excluded, Group, baselines
from polar.trajectory.per_request import PerRequest
from tests.fakes.scripted_rollouts import group, sample, turns, with_completions, write_recordings

ANSWERS = ([[10, 11], [12]], [[20, 21], [22]])
GOOD = group(ANSWERS, (1.0, 0.0), task_id="good")


def made(
    *groups: Group, version: int = 0, tokens: int = 1000, objective: ObjectiveSettings = ObjectiveSettings()
) -> Material:
    return material(groups, objective, BatchSettings(tokens=tokens), PolicyVersions(version))


def trained(found: Material) -> int:
    return sum(len(batch.terms) for batch in found.packing.batches)


def left_out(found: Material) -> dict[str, int]:
    return {name: count for name, count in found.excluded.items() if count}


def test_a_good_group_loses_nothing() -> None:
    found = made(GOOD)
    assert (trained(found), left_out(found)) == (6, {})
    assert found.numbers["reward"] == 0.5


def test_equal_rewards_teach_nothing() -> None:
    found = made(GOOD, group(ANSWERS, (0.5, 0.5)))
    assert (trained(found), left_out(found)) == (6, {Excluded.GROUPS_EQUAL: 1})


def test_the_same_reward_added_up_in_another_order_is_equal() -> None:
    """0.30000000000000004 is no better than 0.3: divided by their deviation, they would be 1 and -1."""
    found = group(([[10]], [[20]]), (0.1 + 0.2, 0.3))
    assert not found.rewards_differ
    assert left_out(made(found)) == {Excluded.GROUPS_EQUAL: 1}


def test_a_group_without_rewards_is_empty() -> None:
    found = made(GOOD, group(ANSWERS, (None, None)), Group("nothing", ()))
    assert (trained(found), left_out(found)) == (6, {Excluded.GROUPS_EMPTY: 2, Excluded.SESSIONS_FAILED: 2})


def test_a_failed_sample_leaves_its_group() -> None:
    found = made(group((*ANSWERS, [[30]]), (1.0, 0.0, None)))
    assert (trained(found), left_out(found)) == (6, {Excluded.SESSIONS_FAILED: 1})


def test_an_unreadable_recording_still_counts_in_the_baseline() -> None:
    lost = replace(GOOD.samples[1], recording=None)
    found = made(Group("good", (GOOD.samples[0], lost)))
    assert (trained(found), left_out(found)) == (3, {Excluded.SESSIONS_UNREADABLE: 1})
    assert found.packing.batches[0].terms.advantages == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 0.5])
def test_unsound_logprobs_leave_alone(wrong: float) -> None:
    completions = turns((1, 2), ANSWERS[0])
    good = sample(completions, 1.0)
    assert good.recording is not None
    # Past the builder, that has refused such a completion before: as if the file had been altered.
    trajectory = good.recording.trajectory
    segments = tuple(
        replace(one, logprobs=np.array([wrong, -1.0], np.float32)) if one.completion_id == "c0" else one
        for one in trajectory.segments
    )
    bad = replace(good, recording=replace(good.recording, trajectory=replace(trajectory, segments=segments)))
    found = made(Group("task", (bad, sample(turns((1, 2), ANSWERS[1]), 0.0, number=1))))
    assert (trained(found), left_out(found)) == (5, {Excluded.TOKENS_UNSOUND: 1})
    assert np.isfinite(found.packing.batches[0].terms.logprobs).all()


def test_stale_tokens_are_left_out_one_by_one() -> None:
    old = group(ANSWERS, (1.0, 0.0), version=3)
    assert trained(made(old, version=5)) == 6
    found = made(old, GOOD, version=6)
    assert (trained(found), left_out(found)) == (0, {Excluded.TOKENS_STALE: 12})
    assert not found.packing.batches


def test_a_trace_over_the_budget_is_left_out_whole() -> None:
    found = made(group(([[10] * 50], *ANSWERS), (1.0, 0.0, 1.0)), tokens=20)
    assert (trained(found), left_out(found)) == (6, {Excluded.TRACES_OVER_BUDGET: 1})
    assert sum(batch.terms.weights.sum() for batch in found.packing.batches) == pytest.approx(1.0)


@given(st.integers(3, 30), st.sampled_from(Pack), st.sampled_from(Level))
def test_a_trace_that_is_cut_is_a_prefix_with_the_credit_of_the_whole(
    tokens: int, pack: Pack, level: Level
) -> None:
    groups = [group(([[10, 11, 12, 13], [14, 15, 16]], [[20, 21]], [[30] * 9]), (1.0, 0.0, 0.3))]
    settings, objective = BatchSettings(tokens=1000, pack=pack), ObjectiveSettings(level=level)
    whole = material(groups, objective, settings, PolicyVersions(0))
    cut = material(
        groups,
        objective,
        settings.model_copy(update={"tokens": tokens, "overlong": TooLong.CUT}),
        PolicyVersions(0),
    )
    seen, kept = contexts(whole), contexts(cut)
    assert all(len(context) <= tokens for _, context in kept)
    if tokens <= 3:
        assert left_out(cut) == {Excluded.TRACES_OVER_BUDGET: 3}
    else:
        # Whatever fits is trained, in the same tokens and with the same advantage.
        assert kept == {key: advantage for key, advantage in seen.items() if len(key[1]) <= tokens}
        beyond = trained(whole) - trained(cut)
        assert left_out(cut) == ({Excluded.TOKENS_OVER_LENGTH: beyond} if beyond else {})


@pytest.mark.parametrize("level", Level)
def test_a_trace_with_nothing_to_learn_before_its_cut_has_no_share(level: Level) -> None:
    old, new = turns((1, 2), [[10, 11], [12]])
    late = sample((old, replace(new, policy_versions=np.array([5], np.int32))), 1.0)
    short = sample(turns((1, 2), [[20]], version=5), 0.0, number=1)
    found = material(
        [Group("task", (late, short))],
        ObjectiveSettings(level=level),
        BatchSettings(tokens=4, overlong=TooLong.CUT),
        PolicyVersions(5),
    )
    assert left_out(found) == {Excluded.TOKENS_STALE: 2, Excluded.TOKENS_OVER_LENGTH: 1}
    assert [batch.names for batch in found.packing.batches] == [("task-1/0",)]


def contexts(found: Material) -> dict[tuple[str, tuple[int, ...]], float]:
    """The advantage of each trained token, by its row and all tokens up to it."""
    told = {}
    for batch in found.packing.batches:
        terms = batch.terms
        for target, row, advantage in zip(terms.targets, terms.rows, terms.advantages, strict=True):
            context, at = [], int(target)
            while at >= 0:
                context.append(int(batch.ids[at]))
                at = int(batch.predecessors[at])
            told[batch.names[row], tuple(reversed(context))] = float(advantage)
    return told


@pytest.mark.parametrize(
    "used",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=0.0),
        Sampling(top_p=0.9),
        Sampling(top_k=20),
        Sampling(logit_bias=((3, 1.0),)),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=-0.5),
    ],
)
def test_tokens_of_another_distribution_are_left_out(used: Sampling) -> None:
    other = with_completions(GOOD.samples[0], used=used)
    found = made(Group("good", (other, GOOD.samples[1])))
    assert (trained(found), left_out(found)) == (3, {Excluded.TOKENS_OFF_DISTRIBUTION: 3})


@pytest.mark.parametrize("mode", [None, "raw_logprobs", "processed_logprobs"])
def test_logprobs_count_at_another_temperature_only_if_they_are_known_to_be_after_it(
    mode: str | None,
) -> None:
    found = made(_of_mode(GOOD, mode, 0.7), objective=ObjectiveSettings(temperature=0.7))
    assert trained(found) == (6 if mode == "processed_logprobs" else 0)
    assert trained(made(_of_mode(GOOD, mode, 1.0))) == 6


def _of_mode(one: Group, mode: str | None, temperature: float) -> Group:
    samples = [with_completions(sample, used=Sampling(temperature=temperature)) for sample in one.samples]
    return Group(one.task_id, tuple(_with_mode(sample, mode) for sample in samples))


def _with_mode(one: EndedSession, mode: str | None) -> EndedSession:
    assert one.recording is not None
    result = one.result.model_copy(update={"logprobs_mode": mode})
    return EndedSession(result, replace(one.recording, result=result))


def compared(rewards: list[float], kind: Advantage) -> list[Baseline]:
    """What each reward is compared with; nothing where all are equal."""
    found = baselines([[reward] for reward in rewards], kind)
    return [one for one in found if one is not None]


rewards = st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=12)


@given(rewards, st.sampled_from(Advantage))
def test_advantages_of_a_group_add_up_to_nothing(given_rewards: list[float], kind: Advantage) -> None:
    against = compared(given_rewards, kind)
    if not against:
        assert len(set(given_rewards)) == 1
        return
    advantages = [one.advantage(reward) for one, reward in zip(against, given_rewards, strict=True)]
    assert sum(advantages) == pytest.approx(0, abs=1e-6 * max(1, *map(abs, advantages)))
    order = sorted(range(len(given_rewards)), key=given_rewards.__getitem__)
    assert all(advantages[a] <= advantages[b] + 1e-9 for a, b in pairwise(order))


def test_leave_one_out_compares_with_the_others() -> None:
    against = compared([1.0, 0.0, 0.5], Advantage.LEAVE_ONE_OUT)
    assert [one.mean for one in against] == [0.25, 0.75, 0.5]


def test_a_share_of_the_reward_is_compared_with_a_share_of_the_mean() -> None:
    against = compared([1.0, 0.0], Advantage.GROUP)
    assert [against[0].advantage(1.0, share) for share in (1.0, 0.5)] == [1.0, 0.5]


def judged(rewards: Sequence[float], of_traces: Sequence[Sequence[float | None]]) -> Group:
    """Sessions of two turns, each a trace; of those, some have rewards of their own."""
    scored = group([ANSWERS[0]] * len(rewards), rewards, builder=PerRequest(PerRequest.Options()))
    return Group(
        "judged", tuple(_judged(one, own) for one, own in zip(scored.samples, of_traces, strict=True))
    )


def _judged(one: EndedSession, own: Sequence[float | None]) -> EndedSession:
    assert one.recording is not None
    assert one.result.verdict is not None
    named = {f"c{turn}": reward for turn, reward in enumerate(own) if reward is not None}
    verdict = one.result.verdict.model_copy(update={"trace_rewards": named})
    result = one.result.model_copy(update={"verdict": verdict})
    trajectory = one.recording.trajectory.with_reward(verdict.reward, named)
    return EndedSession(result, replace(one.recording, trajectory=trajectory, result=result))


def advantages(found: Material) -> list[float]:
    """Of each trained token, in any order."""
    return sorted(round(float(one), 6) for batch in found.packing.batches for one in batch.terms.advantages)


def test_rewards_of_traces_are_compared_with_those_of_other_traces() -> None:
    """Not with the sessions' mean: 0.2 is more than 0.1, whatever the sessions got."""
    found = made(judged([1.0, 0.6], [[0.2, 0.2], [0.1, 0.1]]))
    assert advantages(found) == [-1.0] * 3 + [1.0] * 3


def test_rewards_of_traces_count_where_those_of_their_sessions_are_equal() -> None:
    found = made(judged([0.5, 0.5], [[1.0, 0.0], [0.0, 1.0]]))
    assert (advantages(found), left_out(found)) == ([-1.0] * 3 + [1.0] * 3, {})


def test_a_trace_without_a_reward_of_its_own_is_compared_with_the_sessions() -> None:
    found = made(judged([1.0, 0.0], [[0.9, None], [0.1, None]]))
    assert advantages(found) == [-1.0] * 3 + [1.0] * 3
    alike = made(judged([1.0, 0.0], [[0.9, None], [0.9, None]]))
    assert (advantages(alike), left_out(alike)) == ([-1.0, 1.0], {Excluded.TRACES_EQUAL: 2})


def test_a_session_is_not_compared_with_its_own_traces_where_it_is_left_out() -> None:
    leave = ObjectiveSettings(advantage=Advantage.LEAVE_ONE_OUT)
    found = made(judged([0.5, 0.5], [[1.0, 0.0], [0.0, 0.0]]), objective=leave)
    assert advantages(found) == [-0.5] * 3 + [0.0] + [1.0] * 2


def test_rewards_that_hardly_differ_do_not_become_advantages_of_one() -> None:
    found = group(([[10]], [[20]]), (0.5, 0.5 + 2e-9))
    assert max(map(abs, advantages(made(found)))) < 1e-4
    coarse = made(group(([[10]], [[20]]), (0.5, 0.7)), objective=ObjectiveSettings(min_std=1.0))
    assert advantages(coarse) == [-0.1, 0.1]


def test_the_mean_alone_leaves_the_rewards_their_size() -> None:
    assert (
        advantages(made(GOOD, objective=ObjectiveSettings(advantage=Advantage.MEAN)))
        == [-0.5] * 3 + [0.5] * 3
    )


def test_a_constant_weight_does_not_grow_as_groups_die_out() -> None:
    objective = ObjectiveSettings(level=Level.CONSTANT, session_tokens=10)
    dead = group(ANSWERS, (0.5, 0.5), task_id="dead")
    for groups, weight in (((GOOD,), 1 / 20), ((GOOD, dead), 1 / 40)):
        found = made(*groups, objective=objective)
        assert [
            float(one) for batch in found.packing.batches for one in batch.terms.weights
        ] == pytest.approx([weight] * 6)


@pytest.mark.parametrize("logprob", [1e-7, LOGPROB_TOLERANCE])
def test_what_the_builder_takes_for_rounding_is_trained(logprob: float) -> None:
    rounded = group(ANSWERS, (1.0, 0.0), logprob=logprob)
    found = made(rounded)
    assert (trained(found), left_out(found)) == (6, {})
    assert all(sample.result.stats.trainable_tokens == 3 for sample in rounded.samples)


def test_a_recording_whose_tokens_are_damaged_is_counted_by_its_head(tmp_path: Path) -> None:
    write_recordings([GOOD], tmp_path)
    damaged = tmp_path / "good-1"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    settings = GrpoSettings(out=tmp_path / "run", steps=1, recordings=tmp_path, groups=1)
    found = Recordings(settings, tmp_path).take(PolicyVersions(0))
    assert left_out(found) == {Excluded.SESSIONS_UNREADABLE: 1}
    assert trained(found) == 3
