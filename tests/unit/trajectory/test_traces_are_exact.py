"""Invariants 1 to 4 of the design, for the per_request builder over random sessions."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from polar.models.completion import Completion
from polar.models.trace import Trajectory
from polar.trajectory.accounting import exclusion
from polar.trajectory.materialise import materialise
from polar.trajectory.per_request import PerRequest
from tests.captures import grow
from tests.fakes.sessions import completion, sessions


def build(completions: list[Completion]) -> Trajectory:
    return PerRequest(PerRequest.Options()).build(grow(completions))


@given(sessions())
def test_a_trainable_token_stands_after_exactly_what_the_policy_saw(completions: list[Completion]) -> None:
    by_id = {completion.id: completion for completion in completions}
    trajectory = build(completions)
    for ref in trajectory.traces:
        trace = materialise(trajectory, ref)
        (source,) = (by_id[name] for name in trace.completion_ids)
        assert trace.prompt_ids.tolist() == source.prompt_ids.tolist()
        assert trace.response_ids.tolist() == source.sampled_ids.tolist()
        assert np.array_equal(trace.logprobs, source.logprobs)


@given(sessions())
def test_every_sampled_token_is_trained_once_or_counted_by_name(completions: list[Completion]) -> None:
    trajectory = build(completions)
    stats = trajectory.stats
    trained = [name for ref in trajectory.traces for name in materialise(trajectory, ref).completion_ids]
    assert len(trained) == len(set(trained))
    assert stats.sampled_tokens == sum(len(c.sampled_ids) for c in completions)
    assert stats.sampled_tokens == stats.trainable_tokens + sum(stats.excluded.values())
    assert stats.trainable_tokens == sum(
        int(materialise(trajectory, ref).loss_mask.sum()) for ref in trajectory.traces
    )


@given(sessions())
def test_the_arrays_of_a_trace_are_aligned(completions: list[Completion]) -> None:
    trajectory = build(completions)
    for ref in trajectory.traces:
        trace = materialise(trajectory, ref)
        lengths = {
            len(trace.response_ids),
            len(trace.loss_mask),
            len(trace.logprobs),
            len(trace.policy_versions),
        }
        assert len(lengths) == 1
        assert np.isfinite(trace.logprobs).all()
        assert not trace.logprobs[trace.loss_mask == 0].any()


@given(sessions())
def test_an_excluded_completion_is_never_trained(completions: list[Completion]) -> None:
    trajectory = build(completions)
    trained = {name for ref in trajectory.traces for name in materialise(trajectory, ref).completion_ids}
    for c in completions:
        if exclusion(c) is not None:
            assert c.id not in trained


@given(sessions())
def test_the_forest_holds_a_continued_context_once(completions: list[Completion]) -> None:
    held = sum(len(segment.ids) for segment in grow(completions).forest().segments)
    assert held <= sum(len(c.prompt_ids) + len(c.sampled_ids) for c in completions)


def test_ten_extending_turns_store_each_token_once() -> None:
    completions: list[Completion] = []
    context: list[int] = []
    for turn in range(10):
        prompt = [*context, turn, turn + 1]
        completions.append(completion(turn, prompt, [7, 8, 9], parent=f"c{turn - 1}" if turn else None))
        context = [*prompt, 7, 8, 9]
    assert sum(len(segment.ids) for segment in grow(completions).forest().segments) == len(context)


def test_a_false_claim_of_a_parent_joins_no_more_than_is_the_same() -> None:
    first = completion(0, [1, 2], [3])
    second = completion(1, [1, 2, 4, 5], [6], parent="c0")
    tree = grow([first, second])
    segments = tree.forest().segments
    assert segments[2].parent == 0
    assert segments[2].ids.tolist() == [4, 5]
    assert tree.completions[1].parent is None


def test_the_reward_of_the_session_goes_to_every_trace() -> None:
    trajectory = build([completion(0, [1], [2]), completion(1, [1, 2, 3], [4], parent="c0")])
    assert [ref.reward for ref in trajectory.with_reward(0.5).traces] == [0.5, 0.5]
