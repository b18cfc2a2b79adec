"""What earlier systems got wrong when they merged turns, and what each drift policy makes of a turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar.models.chat import FinishReason
from polar.models.completion import Completion
from polar.models.trace import DriftPolicy, Trajectory
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.sessions import completion
from tests.fakes.trace_oracle import assert_invariants, traces

END = 99
SYSTEM = list(range(1000, 1030))
"""Longer than what a template may open a turn with."""


def build(*completions: Completion, **options: Any) -> Trajectory:
    made = PrefixMerging(PrefixMerging.Options(**options)).build(grow(completions))
    if options.get("drift") is not DriftPolicy.APPROXIMATE:
        assert_invariants(completions, made)
    return made


def trained(trajectory: Trajectory) -> list[tuple[str, ...]]:
    return [trace.completion_ids for trace in traces(trajectory)]


def conversation(turns: int) -> list[Completion]:
    made: list[Completion] = []
    context = SYSTEM
    for turn in range(turns):
        prompt = [*context, 10 + turn, 20 + turn]
        made.append(completion(turn, prompt, [50 + turn, END], parent=f"c{turn - 1}" if turn else None))
        context = [*prompt, 50 + turn, END]
    return made


def test_a_conversation_is_one_trace_with_only_the_answers_trained() -> None:
    trajectory = build(*conversation(3))
    (trace,) = traces(trajectory)
    assert trace.prompt_ids.tolist() == [*SYSTEM, 10, 20]
    assert trace.response_ids.tolist() == [50, END, 11, 21, 51, END, 12, 22, 52, END]
    assert trace.loss_mask.tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert trace.policy_versions.tolist() == [0, 0, -1, -1, 1, 1, -1, -1, 2, 2]
    assert trajectory.stats.drift == {"clean": 2}
    assert trajectory.stats.merge_ratio == (34 + 38 + 42) / 42


@pytest.mark.parametrize("continued", [0, 1])
def test_a_retry_does_not_end_the_merge_and_the_answer_not_taken_is_named(continued: int) -> None:
    first, *_ = conversation(1)
    again = completion(1, first.prompt_ids.tolist(), [60, END])
    taken = (first, again)[continued]
    rest = [*taken.prompt_ids.tolist(), *taken.sampled_ids.tolist(), 30]
    after = completion(2, rest, [70, END], parent=taken.id)
    trajectory = build(first, again, after)
    assert trained(trajectory) == [(taken.id, "c2")]
    assert trajectory.stats.excluded == {"retry_superseded": 2}


def test_answers_to_one_prompt_that_nothing_continues_are_alternatives() -> None:
    first, *_ = conversation(1)
    again = completion(1, first.prompt_ids.tolist(), [60, END])
    trajectory = build(first, again)
    assert trained(trajectory) == [("c0",), ("c1",)]
    assert sum(len(segment.ids) for segment in trajectory.segments) == len(SYSTEM) + 2 + 4


def test_answers_of_different_agents_to_one_prompt_are_no_retries() -> None:
    first, second = (replace(one, extra={"agent_id": "a"}) for one in conversation(2))
    other = completion(3, first.prompt_ids.tolist(), [60, END])
    trajectory = build(first, replace(other, extra={"agent_id": "b"}), second)
    assert trained(trajectory) == [("c0", "c1"), ("c3",)]
    assert trajectory.stats.excluded == {}


def test_a_retry_after_a_lost_connection_leaves_one_answer() -> None:
    first, second = conversation(2)
    lost = replace(first, id="lost", finish_reason=FinishReason.CANCELLED)
    trajectory = build(lost, first, second)
    assert trained(trajectory) == [("c0", "c1")]
    assert trajectory.stats.excluded == {"cancelled": 2}


def test_where_a_context_is_continued_twice_the_common_part_is_trained_once() -> None:
    first, second, third = conversation(3)
    aside = completion(3, [*second.prompt_ids, *second.sampled_ids, 77], [78], parent="c1")
    trajectory = build(first, second, third, aside)
    assert trained(trajectory) == [("c0", "c1", "c2"), ("c3",)]
    assert trajectory.traces[1].parent == 0
    (_, branch) = traces(trajectory)
    assert branch.prompt_ids.tolist() == [*second.prompt_ids, *second.sampled_ids, 77]


def drifted(*, follows: str | None = "c0") -> tuple[Completion, Completion, Completion]:
    """The second prompt holds the first answer [50, 51, END] as [5051, END]; the third extends the second."""
    first = completion(0, [*SYSTEM, 10], [50, 51, END])
    second = replace(completion(1, [*SYSTEM, 10, 5051, END, 11], [60, END]), follows=follows)
    third = completion(2, [*second.prompt_ids, *second.sampled_ids, 12], [70, END], parent="c1")
    return first, second, third


def test_drift_forks_and_both_sides_are_trained() -> None:
    trajectory = build(*drifted())
    assert sorted(trained(trajectory)) == [("c0",), ("c1", "c2")]
    assert trajectory.stats.drift == {"clean": 1, "drift": 1}
    assert trajectory.stats.excluded == {}


def test_realign_keeps_one_trace_and_counts_the_answer_it_replaced() -> None:
    trajectory = build(*drifted(), drift=DriftPolicy.REALIGN)
    (trace,) = traces(trajectory)
    assert trace.completion_ids == ("c1", "c2")
    assert [*trace.prompt_ids, *trace.response_ids][30:] == [10, 5051, END, 11, 60, END, 12, 70, END]
    assert trajectory.stats.excluded == {"realigned": 3}


def test_realign_still_trains_what_stood_before_the_drift() -> None:
    first = completion(0, [*SYSTEM, 10], [40, END])
    second = completion(1, [*SYSTEM, 10, 40, END, 11], [50, 51, END], parent="c0")
    third = replace(completion(2, [*SYSTEM, 10, 40, END, 11, 5051, END, 12], [60, END]), follows="c1")
    trajectory = build(first, second, third, drift=DriftPolicy.REALIGN)
    assert trained(trajectory) == [("c0", "c2")]
    assert trajectory.stats.excluded == {"realigned": 3}


def test_realign_drops_nothing_for_an_answer_that_is_not_trained_itself() -> None:
    first, second, _ = drifted()
    second = replace(second, finish_reason=FinishReason.CANCELLED)
    trajectory = build(first, second, drift=DriftPolicy.REALIGN)
    assert trained(trajectory) == [("c0",)]


def test_approximate_keeps_what_was_sampled_and_flags_all_that_follows() -> None:
    trajectory = build(*drifted(), drift=DriftPolicy.APPROXIMATE)
    (trace,) = traces(trajectory)
    assert trace.completion_ids == ("c0", "c1", "c2")
    assert trace.response_ids.tolist() == [50, 51, END, 11, 60, END, 12, 70, END]
    assert trace.approximate_from == 3
    assert trajectory.stats.approximate_tokens == 4
    assert trajectory.stats.excluded == {}


def test_approximate_forks_where_the_end_of_the_answer_cannot_be_told() -> None:
    first, second, third = drifted()
    cut = replace(first, finish_reason=FinishReason.LENGTH)
    trajectory = build(cut, second, third, drift=DriftPolicy.APPROXIMATE)
    assert sorted(trained(trajectory)) == [("c0",), ("c1", "c2")]
    assert trajectory.stats.approximate_tokens == 0


@pytest.mark.parametrize("policy", DriftPolicy)
def test_a_rewritten_history_forks_whatever_the_policy(policy: DriftPolicy) -> None:
    first = completion(0, [*SYSTEM, *range(200, 230)], [50, END])
    changed = [*SYSTEM, 7, *range(201, 230), 50, END, 11]
    second = replace(completion(1, changed, [60, END]), follows="c0")
    trajectory = build(first, second, drift=policy)
    assert sorted(trained(trajectory)) == [("c0",), ("c1",)]
    assert trajectory.stats.drift == {"rewritten": 1}


@pytest.mark.parametrize("policy", DriftPolicy)
def test_a_last_message_that_history_shows_otherwise_is_not_taken_for_the_opening_of_the_turn(
    policy: DriftPolicy,
) -> None:
    first = completion(0, [*SYSTEM, 10, 11, END, 902], [50, 51, END])
    changed = [*SYSTEM, 10, 12, END, 902, 50, 51, END, 13, END, 902]
    second = replace(completion(1, changed, [60, END]), follows="c0")
    trajectory = build(first, second, drift=policy)
    assert_invariants([first, second], trajectory)
    assert sorted(trained(trajectory)) == [("c0",), ("c1",)]
    assert trajectory.stats.drift == {"rewritten": 1}


def test_tokens_up_to_the_end_of_a_turn_are_compared_before_they_are_taken_for_the_sampled_ones() -> None:
    first = completion(0, [*SYSTEM, 10], [50, END])
    other = completion(1, [*SYSTEM, 10, 51, END, 11], [60, END], parent="c0")
    trajectory = build(first, other)
    assert sorted(trained(trajectory)) == [("c0",), ("c1",)]
    assert trajectory.stats.drift == {"drift": 1}


def test_text_and_call_replayed_as_two_messages_do_not_train_the_call_twice() -> None:
    role = 901
    first = completion(0, [*SYSTEM, 10, role], [50, 51, END])
    second = replace(
        completion(1, [*SYSTEM, 10, role, 50, END, role, 51, END, 11, role], [60, END]), follows="c0"
    )
    trajectory = build(first, second)
    assert sorted(trained(trajectory)) == [("c0",), ("c1",)]
    assert trajectory.stats.trainable_tokens == 5


def test_a_generation_prompt_that_history_does_not_show_is_drift_and_loses_nothing() -> None:
    role, think = 902, 903
    first = completion(0, [*SYSTEM, 10, role, think], [50, END])
    second = replace(completion(1, [*SYSTEM, 10, role, 50, END, 11, role, think], [60, END]), follows="c0")
    trajectory = build(first, second)
    assert trajectory.stats.drift == {"drift": 1}
    assert trajectory.stats.trainable_tokens == trajectory.stats.sampled_tokens
    assert trained(build(first, second, drift=DriftPolicy.REALIGN)) == [("c1",)]


def test_an_answer_ended_by_a_stop_string_is_trained_without_an_end_that_was_not_sampled() -> None:
    first = completion(0, [*SYSTEM, 10], [50, 51])
    second = completion(1, [*SYSTEM, 10, 50, 51, END, 11], [60, END], parent="c0")
    (trace,) = traces(build(first, second))
    assert trace.loss_mask.tolist() == [1, 1, 0, 0, 1, 1]


def test_nothing_after_a_break_is_dropped() -> None:
    turns = conversation(6)
    broken = replace(
        turns[3], prompt_ids=completion(0, [*SYSTEM, 1, 2, 3], []).prompt_ids, parent=None, follows="c2"
    )
    trajectory = build(*turns[:3], broken, *turns[4:])
    assert trajectory.stats.trainable_tokens == trajectory.stats.sampled_tokens
    assert sorted(trained(trajectory)) == [("c0", "c1", "c2", "c4", "c5"), ("c3",)]


def test_a_completion_without_token_ids_is_recorded_and_never_trained() -> None:
    text_only = replace(completion(0, [], []), untrainable="the engine gave no token ids")
    trajectory = build(text_only, *conversation(2)[1:])
    assert trained(trajectory) == [("c1",)]
    assert trajectory.stats.completions == 2
