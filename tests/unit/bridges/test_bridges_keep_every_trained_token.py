"""Each trainer gets the trained tokens of a session as they were recorded, or their number and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.bridges.nemo_gym import response
from polar.bridges.sessions import ScoredSession, scored_session
from polar.bridges.trl import REWARD, columns
from polar.errors import InvalidInput
from polar.models.chat import Sampling
from polar.models.trace import DriftPolicy, Trace
from polar.trajectory.learnable import Advantage
from polar.trajectory.prefix_merging import Credit, PrefixMerging
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.scripted_rollouts import sample, turns
from tests.fakes.trainer_types import (
    GENERATOR_OUTPUT,
    SlimeSample,
    TrajectoryID,
    bridge,
    slime_train_data,
)

verl, slime, skyrl, prime_rl, areal = map(bridge, ("verl", "slime", "skyrl", "prime_rl", "areal"))

FILLER = 0
TEMPERATURES = st.sampled_from([1.0] * 5 + [0.5])


@st.composite
def sessions(draw: st.DrawFn, number: int = 0) -> ScoredSession:
    """A random session, some of whose calls were sampled otherwise than the trainer computes."""
    played = draw(agent_sessions())
    completions = tuple(replace(one, used=Sampling(temperature=draw(TEMPERATURES))) for one in played)
    options = PrefixMerging.Options(
        credit=draw(st.sampled_from(Credit)), drift=draw(st.sampled_from(DriftPolicy))
    )
    reward = draw(st.sampled_from([0.0, 0.5, 1.0, None]))
    made = sample(completions, reward, number=number, builder=PrefixMerging(options))
    return scored_session(made, 1.0)


@st.composite
def groups(draw: st.DrawFn) -> list[ScoredSession]:
    return [draw(sessions(number)) for number in range(draw(st.integers(1, 3)))]


@dataclass(frozen=True)
class Row:
    """What of a trace every trainer must get."""

    ids: tuple[int, ...]
    trained: tuple[tuple[int, int, float], ...]
    """Where in the sequence, which token, how likely."""


def row(ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]) -> Row:
    """Of arrays that have the length of the whole sequence."""
    assert len(ids) == len(mask) == len(logprobs)
    assert all(logprob == 0.0 for logprob, kept in zip(logprobs, mask, strict=True) if not kept)
    trained = [(at, ids[at], logprobs[at]) for at in range(len(ids)) if mask[at]]
    return Row(tuple(ids), tuple(trained))


def split_row(
    prompt: Sequence[int], response: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]
) -> Row:
    """Of mask and logprobs that have the length of the response."""
    none = [0] * len(prompt)
    return row([*prompt, *response], [*none, *mask], [*map(float, none), *logprobs])


def row_of(trace: Trace) -> Row:
    arrays = (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.logprobs)
    return split_row(*(array.tolist() for array in arrays))


def rows_of(session: ScoredSession) -> list[Row]:
    return [row_of(trace) for trace in session.traces]


def is_filling(found: Row) -> bool:
    return found == Row((FILLER, FILLER), ())


def tokens_left_out(session: ScoredSession) -> int:
    return sum(count for name, count in session.excluded.items() if name.startswith("tokens_"))


@given(sessions())
def test_what_is_trained_and_what_is_left_out_by_name_is_all(session: ScoredSession) -> None:
    trainable = session.result.stats.trainable_tokens
    narrow, cut = session.with_one_trace(), session.truncated(12, 9)
    if session.reward is None:
        assert not session.traces
        assert session.excluded == Counter({"sessions_failed": 1})
        return
    for one in (session, narrow, cut):
        assert one.trained_tokens + tokens_left_out(one) == trainable
    assert len(narrow.traces) == min(1, len(session.traces))
    assert all(len(trace.prompt_ids) <= 12 and len(trace.response_ids) <= 9 for trace in cut.traces)
    assert all(trace.loss_mask.any() for one in (session, narrow, cut) for trace in one.traces)


@settings(max_examples=50)
@given(groups())
def test_trl_gets_one_row_a_session(group: list[ScoredSession]) -> None:
    narrow = [session.with_one_trace() for session in group]
    found = columns(narrow, FILLER)
    assert {len(column) for column in found.values()} == {len(group)}
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs")
    for session, *values in zip(narrow, *(found[name] for name in names), strict=True):
        made = split_row(*values)
        assert [made] == rows_of(session) if session.traces else is_filling(made)
    assert found[REWARD] == [session.reward for session in group]


@given(sessions())
def test_verl_gets_one_row_a_session(session: ScoredSession) -> None:
    made = verl.output(session, FILLER)
    found = split_row(made.prompt_ids, made.response_ids, made.response_mask, made.response_logprobs)
    narrow = session.with_one_trace()
    assert [found] == rows_of(narrow) if narrow.traces else is_filling(found)
    assert made.reward_score == (session.reward or 0.0)
    assert made.extra_fields["polar_excluded"] == narrow.excluded


@given(sessions())
def test_slime_gets_a_sample_for_each_trace(session: ScoredSession) -> None:
    made = slime.samples(session, SlimeSample(index=7, group_index=2, metadata={"mine": 1}))
    assert {one.rollout_id for one in made} == {7}
    assert {one.metadata["mine"] for one in made} == {1}
    if not session.traces:
        (nothing,) = made
        assert nothing.remove_sample
        assert (nothing.status is SlimeSample.Status.FAILED) == (session.reward is None)
        assert nothing.reward == (session.reward or 0.0)
        return
    split = [
        split_row(
            one.tokens[: -one.response_length],
            one.tokens[len(one.tokens) - one.response_length :],
            one.loss_mask,
            one.rollout_log_probs,
        )
        for one in made
    ]
    assert split == rows_of(session)
    assert [one.reward for one in made] == [trace.reward for trace in session.traces]


@settings(max_examples=50)
@given(groups(), st.booleans())
def test_skyrl_gets_each_trace_as_a_step(group: list[ScoredSession], step_wise: bool) -> None:
    ids = [TrajectoryID("task", number) for number in range(len(group))]
    scores = [session.reward for session in group if session.reward is not None]
    made = skyrl.output(group, ids, FILLER, step_wise=step_wise)
    assert made.keys() == GENERATOR_OUTPUT
    expected = group if step_wise else [session.with_one_trace() for session in group]
    steps = [max(1, len(session.traces)) for session in expected]
    assert made["trajectory_ids"] == [id for id, count in zip(ids, steps, strict=True) for _ in range(count)]
    found = iter(
        zip(
            made["prompt_token_ids"],
            made["response_ids"],
            made["loss_masks"],
            made["rollout_logprobs"],
            strict=True,
        )
    )
    rewards = iter(made["rewards"])
    for session, count in zip(expected, steps, strict=True):
        rows = [split_row(*next(found)) for _ in range(count)]
        assert rows == rows_of(session) if session.traces else is_filling(rows[0])
        # The trainer compares sessions by their last step; one that failed leaves the group's mean as it is.
        reward = fmean(scores or [0.0]) if session.reward is None else session.reward
        assert [next(rewards) for _ in range(count)] == [0.0] * (count - 1) + [reward]
    if step_wise:
        assert sum(made["is_last_step"]) == len(group)
    else:
        assert made["is_last_step"] is None
    left_out = sum((session.excluded for session in expected), Counter[str]())
    assert made["rollout_metrics"] == {f"polar/excluded/{name}": left_out[name] for name in left_out}


@settings(max_examples=50)
@given(groups())
def test_prime_rl_gets_whole_sequences_with_advantages(group: list[ScoredSession]) -> None:
    made = prime_rl.training_samples(group)
    rewards = [session.reward for session in group if session.reward is not None]
    if len(set(rewards)) < 2:
        assert made == []
        return
    found = [row(one.token_ids, one.mask, one.logprobs) for one in made]
    assert found == [one for session in group for one in rows_of(session)]
    traces = [(session, trace) for session in group for trace in session.traces]
    for one, (session, trace) in zip(made, traces, strict=True):
        assert len(one.temperatures) == len(one.advantages) == len(one.token_ids)
        worth = advantage(group, session, trace)
        assert one.advantages == pytest.approx([worth if kept else 0.0 for kept in one.mask])


@pytest.mark.parametrize("kind", [Advantage.TREE, Advantage.TURN, Advantage.NONE])
def test_a_trainer_that_compares_whole_sessions_says_so(kind: Advantage) -> None:
    with pytest.raises(InvalidInput, match="compare whole sessions"):
        prime_rl.training_samples([], advantage=kind)


@settings(max_examples=50)
@given(groups())
def test_areal_gets_a_group_as_a_batch_of_whole_sequences(group: list[ScoredSession]) -> None:
    made = areal.episode(group)
    traces = [(session, trace) for session in group for trace in session.traces]
    if not traces:
        assert made is None
        return
    assert {tensor.shape[0] for tensor in made.values()} == {len(traces)}
    found = []
    for number, (_, trace) in enumerate(traces):
        there = made["attention_mask"][number]
        ids, mask, logprobs, versions = (
            made[name][number][there].tolist() for name in ("input_ids", "loss_mask", "logprobs", "versions")
        )
        found.append(row(ids, mask, logprobs))
        # The reward of a row stands on its last token.
        assert mask[-1] == 1
        response = len(ids) - len(trace.prompt_ids)
        assert versions[len(trace.prompt_ids) :] == trace.policy_versions.tolist()[:response]
        # What fills a row up is never trained.
        assert not made["loss_mask"][number][~there].any()
    assert found == [without_untrained_tail(one) for session in group for one in rows_of(session)]
    assert made["rewards"].tolist() == pytest.approx([advantage(group, *one) for one in traces], abs=1e-6)


def advantage(group: list[ScoredSession], session: ScoredSession, trace: Trace) -> float:
    """Of a trace, with each session once in the group and none that failed."""
    rewards = [one.reward for one in group if one.reward is not None]
    assert session.reward is not None
    assert trace.reward is not None
    if len(set(rewards)) < 2:
        return 0.0
    return float((trace.reward - trace.share * np.mean(rewards)) / np.std(rewards))


def areal_config(**actor: Any) -> SimpleNamespace:
    settings = {name.split(".")[1]: value for name, value in areal.REQUIRED_CONFIG.items()}
    norm = SimpleNamespace(mean_level="batch", std_level="batch")
    return SimpleNamespace(
        gconfig=SimpleNamespace(n_samples=settings.pop("n_samples"), temperature=0.7),
        actor=SimpleNamespace(**{**settings, "adv_norm": norm, **actor}),
    )


def test_areal_is_refused_where_it_would_normalise_advantages_again() -> None:
    assert isinstance(areal.workflow(areal_config(), 8), areal.PolarWorkflow)
    groups_of_rows = SimpleNamespace(mean_level="group", std_level=None)
    for wrong in ({"reward_norm": object()}, {"reward_bias": -0.5}, {"adv_norm": groups_of_rows}):
        with pytest.raises(InvalidInput, match=f"actor.{next(iter(wrong))}"):
            areal.workflow(areal_config(**wrong), 8)


def growing(items: Sequence[dict[str, Any]]) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """What NeMo RL reads of a response: each prompt begins with all that came before it."""
    seen: list[int] = []
    for item in items:
        if "generation_token_ids" in item:
            prompt, sampled = item["prompt_token_ids"], item["generation_token_ids"]
            assert prompt[: len(seen)] == seen
            yield prompt[len(seen) :], sampled, item["generation_log_probs"]
            seen = [*prompt, *sampled]


def assert_nemo_rl_trains_the_trace(session: ScoredSession) -> None:
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for given_ids, sampled, likely in growing(response(session, {})["output"]):
        ids += given_ids + sampled
        mask += [0] * len(given_ids) + [1] * len(sampled)
        logprobs += [0.0] * len(given_ids) + likely
    assert [row(ids, mask, logprobs)] * bool(ids) == [without_untrained_tail(one) for one in rows_of(session)]


def without_untrained_tail(found: Row) -> Row:
    """A sequence that ends in tokens that are not trained may as well end before them."""
    (end, _, _) = found.trained[-1]
    return Row(found.ids[: end + 1], found.trained)


@given(sessions())
def test_nemo_gym_gets_a_response_that_grows_by_its_calls(session: ScoredSession) -> None:
    assert_nemo_rl_trains_the_trace(session.with_one_trace())


@settings(max_examples=50)
@given(groups())
def test_slime_can_make_a_batch_of_any_group(group: list[ScoredSession]) -> None:
    made = [one for session in group for one in slime.samples(session, SlimeSample(index=0))]
    arrays = slime_train_data(made)
    assert [len(mask) for mask in arrays["loss_masks"]] == [len(one) for one in arrays["rollout_log_probs"]]
    assert all(len(one.tokens) > one.response_length for one in made if not one.metadata.get("polar_share"))
    trained = sum(sum(mask) for mask in arrays["loss_masks"])
    assert trained == sum(session.trained_tokens for session in group)


def test_slime_counts_a_session_once_in_its_group() -> None:
    """Three samples of a session with reward 1 and one of a session with 0: the mean is a half."""

    def made(rollout_id: int, reward: float, count: int, group: int = 0) -> list[SlimeSample]:
        metadata = {"polar_reward": reward, "polar_share": 1.0}
        return [
            SlimeSample(group_index=group, rollout_id=rollout_id, reward=reward, metadata=metadata)
            for _ in range(count)
        ]

    failed = SlimeSample(group_index=0, rollout_id=9, reward=0.0, metadata={"polar_reward": None})
    alone = made(4, 1.0, 2, group=1)
    raw, normalised = slime.normalise(None, [made(1, 1.0, 3), made(2, 0.0, 1), failed, alone])
    assert raw == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert normalised == [1.0, 1.0, 1.0, -1.0, 0.0, 0.0, 0.0]


def test_a_trace_with_a_share_is_compared_with_the_same_share() -> None:
    metadata = {"polar_reward": 1.0, "polar_share": 0.5}
    halves = [SlimeSample(group_index=0, rollout_id=1, reward=0.5, metadata=metadata) for _ in range(2)]
    other = SlimeSample(
        group_index=0, rollout_id=2, reward=0.0, metadata={"polar_reward": 0.0, "polar_share": 1.0}
    )
    assert slime.normalise(None, [halves, other])[1] == [0.5, 0.5, -1.0]


def test_slime_compares_sessions_also_where_traces_have_rewards_of_their_own() -> None:
    """Of rewards 1 and 0, the first in traces that were given 0.2 and 0.1: both did better than the mean."""
    metadata = {"polar_reward": 1.0, "polar_share": 1.0}
    own = [SlimeSample(group_index=0, rollout_id=1, reward=one, metadata=metadata) for one in (0.2, 0.1)]
    other = SlimeSample(
        group_index=0, rollout_id=2, reward=0.0, metadata={"polar_reward": 0.0, "polar_share": 1.0}
    )
    assert slime.normalise(None, [own, other]) == ([0.2, 0.1, 0.0], [1.0, 1.0, -1.0])


def two_turns(*, drift: DriftPolicy = DriftPolicy.FORK, logprob: float = -0.5) -> ScoredSession:
    """The second prompt holds the first answer in other tokens where it drifts; `logprob` is of its last."""
    first, second = turns((1, 2, 3), [[10, 11, 12], [13, 14, 15]])
    second = replace(second, logprobs=np.array([-0.5, logprob, -0.5], np.float32))
    if drift is not DriftPolicy.FORK:
        drifted = np.array([1, 2, 3, 20, 12, 7, 8], np.int32)
        second = replace(second, prompt_ids=drifted, parent=None, follows=first.id)
    made = sample((first, second), 1.0, builder=PrefixMerging(PrefixMerging.Options(drift=drift)))
    return scored_session(made, 1.0)


def test_nemo_gym_gets_the_prompts_of_the_trace_where_the_harness_sent_other_tokens() -> None:
    session = two_turns(drift=DriftPolicy.APPROXIMATE)
    assert [trace.approximate_from is not None for trace in session.traces] == [True]
    assert session.trained_tokens == 6
    assert_nemo_rl_trains_the_trace(session)


def test_nemo_gym_trains_the_rest_of_a_session_with_a_logprob_that_rounding_put_above_zero() -> None:
    session = two_turns(logprob=1e-7)
    assert session.trained_tokens >= 5
    assert_nemo_rl_trains_the_trace(session)


@pytest.mark.parametrize("untrained", [0, 1, 2, 5, 6, 7])
def test_nemo_gym_trains_all_but_a_token_that_must_not_be_trained(untrained: int) -> None:
    session = two_turns()
    (trace,) = session.traces
    mask, logprobs = trace.loss_mask.copy(), trace.logprobs.copy()
    mask[untrained], logprobs[untrained] = 0, 0.0
    session = replace(session, traces=(replace(trace, loss_mask=mask, logprobs=logprobs),))
    assert session.trained_tokens == 5
    assert_nemo_rl_trains_the_trace(session)


def test_nemo_gym_shows_a_call_that_must_not_be_trained_as_context() -> None:
    first, second, third = turns((1, 2, 3), [[10, 11], [13], [14]])
    second = replace(second, used=Sampling(temperature=0.2))
    made = sample((first, second, third), 1.0)
    session = scored_session(made, 1.0)
    assert session.trained_tokens == 3
    assert_nemo_rl_trains_the_trace(session)
    said = [item for item in response(session, {})["output"] if item.get("role") == "assistant"]
    assert ["generation_token_ids" in item for item in said] == [True, False, True]
