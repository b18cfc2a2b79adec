"""Invariants 1 to 4 for every builder and option, over whole random sessions, against a naive oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from polar.models.completion import Completion
from polar.models.trace import DriftPolicy, Lineage, Trajectory
from polar.recordings.tree import Continuation
from polar.trajectory.accounting import Exclusion
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import Credit, Overlong, PrefixMerging
from tests.captures import grow
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.trace_oracle import (
    assert_aligned,
    assert_exactly_once,
    assert_fails_closed,
    assert_invariants,
    context,
    is_sound,
    traces,
)

LENGTHS = st.none() | st.integers(1, 60)
OPTIONS = st.fixed_dictionaries(
    {
        "drift": st.sampled_from([DriftPolicy.FORK, DriftPolicy.REALIGN]),
        "credit": st.sampled_from(Credit),
        "include_auxiliary": st.booleans(),
        "max_tokens": LENGTHS,
        "max_response_tokens": LENGTHS,
        "on_overlong": st.sampled_from(Overlong),
    }
)


def build(completions: list[Completion], **options: Any) -> Trajectory:
    return PrefixMerging(PrefixMerging.Options(**options)).build(grow(completions))


@given(agent_sessions(), OPTIONS)
def test_merged_traces_keep_the_invariants_whatever_is_asked(
    completions: list[Completion], options: dict[str, Any]
) -> None:
    trajectory = build(completions, **options)
    assert_invariants(completions, trajectory)
    for trace in traces(trajectory):
        length = len(trace.prompt_ids) + len(trace.response_ids)
        assert length <= (options["max_tokens"] or length)
        assert len(trace.response_ids) <= (options["max_response_tokens"] or length)
        assert trace.approximate_from is None


@given(agent_sessions())
def test_traces_of_single_requests_keep_the_invariants(completions: list[Completion]) -> None:
    trajectory = PerRequest(PerRequest.Options()).build(grow(completions))
    assert_invariants(completions, trajectory)
    assert trajectory.stats.merge_ratio == 1.0


@given(agent_sessions())
def test_approximate_traces_flag_every_token_whose_context_is_another(completions: list[Completion]) -> None:
    trajectory = build(completions, drift=DriftPolicy.APPROXIMATE)
    assert_exactly_once(completions, trajectory)
    assert_aligned(trajectory)
    assert_fails_closed(completions, trajectory)
    by_id = {completion.id: completion for completion in completions}
    flagged = 0
    for trace in traces(trajectory):
        tokens = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        exact = len(trace.response_ids) if trace.approximate_from is None else trace.approximate_from
        flagged += int(trace.loss_mask[exact:].sum())
        trained = np.flatnonzero(trace.loss_mask).tolist()
        for name in trace.completion_ids:
            sampled = by_id[name].sampled_ids.tolist()
            start, trained = trained[0], trained[len(sampled) :]
            assert trace.response_ids[start : start + len(sampled)].tolist() == sampled
            before = tokens[: len(trace.prompt_ids) + start]
            assert start >= exact or before == by_id[name].prompt_ids.tolist()
    assert trajectory.stats.approximate_tokens == flagged


@given(agent_sessions())
def test_with_fork_every_sound_answer_is_trained_unless_it_is_a_side_call_or_a_retry(
    completions: list[Completion],
) -> None:
    trajectory = build(completions)
    trained = {name for trace in traces(trajectory) for name in trace.completion_ids}
    left_out = [c for c in completions if is_sound(c) and c.id not in trained and len(c.sampled_ids)]
    stats = trajectory.stats
    assert set(stats.excluded) <= set(Exclusion) - {Exclusion.REALIGNED, Exclusion.OVER_LENGTH}
    named = stats.excluded.get("retry_superseded", 0) + stats.excluded.get("auxiliary", 0)
    assert sum(len(c.sampled_ids) for c in left_out) <= named
    prompts = [c.prompt_ids.tolist() for c in completions]
    for c in left_out:
        is_retried = prompts.count(c.prompt_ids.tolist()) > 1
        assert is_retried or not c.tools or c.asked.max_tokens == 1


@given(agent_sessions(tokens_mode=True, sound=True))
def test_completions_are_merged_as_far_as_their_tokens_allow(completions: list[Completion]) -> None:
    """As many chains as there are trained answers that no other trained answer extends (all pairs)."""
    trajectory = build(completions)
    trained = {name for trace in traces(trajectory) for name in trace.completion_ids}
    kept = [c for c in completions if c.id in trained]
    leaves = {
        tuple(context(c))
        for c in kept
        if not any(c is not d and d.prompt_ids.tolist()[: len(context(c))] == context(c) for d in kept)
    }
    assert trajectory.stats.chains >= len(leaves)
    twice = len(kept) - len({tuple(context(c)) for c in kept})
    assert trajectory.stats.chains <= len(leaves) + twice


@given(agent_sessions(tokens_mode=True))
def test_chains_are_found_without_being_told_who_extends_whom(completions: list[Completion]) -> None:
    # Of two answers alike to the same prompt only a claim can say which one was continued.
    assume(len({tuple(context(c)) for c in completions}) == len(completions))
    silent = [replace(c, parent=None, follows=None) for c in completions]
    told, found = build(completions).stats, build(silent).stats
    assert (told.chains, told.trace_tokens, told.trainable_tokens) == (
        found.chains,
        found.trace_tokens,
        found.trainable_tokens,
    )


@given(agent_sessions())
def test_false_claims_are_not_believed(completions: list[Completion]) -> None:
    claims = [replace(c, parent=f"c{(place * 7) % (place + 1)}") for place, c in enumerate(completions)]
    assert_invariants(claims, build(claims))
    tree = grow(claims)
    by_id = {c.id: c for c in tree.completions}
    for c, link in zip(tree.completions, tree.links, strict=True):
        if c.parent is not None:
            parent = by_id[c.parent]
            assert link.kind is Continuation.CLEAN
            assert c.prompt_ids.tolist()[: len(context(parent))] == context(parent)


@given(agent_sessions(), st.floats(-2, 2))
def test_rewards_are_shared_as_asked(completions: list[Completion], reward: float) -> None:
    for credit in Credit:
        scored = build(completions, credit=credit).with_reward(reward)
        rewards = [ref.reward for ref in scored.traces]
        match credit:
            case Credit.OUTCOME:
                assert set(rewards) <= {reward}
            case Credit.DIVIDED:
                assert not rewards or np.isclose(sum(filter(None, rewards)), reward)
            case Credit.MAIN:
                assert set(rewards) <= {reward}
                assert {ref.lineage for ref in scored.traces} <= {Lineage.MAIN, Lineage.COMPACTED}


@given(agent_sessions())
def test_a_parent_begins_before_what_came_out_of_it(completions: list[Completion]) -> None:
    place = {c.id: c.index for c in completions}
    made = build(completions)
    firsts = [place[trace.completion_ids[0]] for trace in traces(made)]
    for index, ref in enumerate(made.traces):
        assert ref.parent is None or firsts[ref.parent] < firsts[index]


@given(agent_sessions())
def test_realign_trains_nothing_that_fork_does_not(completions: list[Completion]) -> None:
    forked, aligned = build(completions), build(completions, drift=DriftPolicy.REALIGN)
    names = {name for trace in traces(forked) for name in trace.completion_ids}
    kept = {name for trace in traces(aligned) for name in trace.completion_ids}
    assert kept <= names
    by_id = {c.id: c for c in completions}
    lost = sum(len(by_id[name].sampled_ids) for name in names - kept)
    assert aligned.stats.excluded.get("realigned", 0) == lost
    assert aligned.stats.chains <= forked.stats.chains
    assert all(is_sound(by_id[name]) for name in kept)
