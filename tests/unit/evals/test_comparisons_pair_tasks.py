"""Two runs are compared on what both did, task by task and sample by sample."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import InvalidInput
from polar.evals.comparison import Comparison, PairCounts, TaskChange, compare
from tests.fakes.reports import cell, report

outcomes = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.sampled_from([0.0, 0.5, 1.0, None]), min_size=1, max_size=3)
)


def test_seeds_match_only_where_both_gave_each_task_its_own() -> None:
    one = report(cell({"a": [1.0]}), seed=1)
    other = one.model_copy(update={"has_seeds_of_tasks": not one.has_seeds_of_tasks})
    assert compare(one, one).seeds_match
    assert not compare(one, other).seeds_match


def test_differences_are_of_the_same_tasks_and_samples() -> None:
    before = report(cell({"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "gone": [1.0, 1.0]}), seed=1)
    after = report(cell({"c": [0.0, 0.0], "b": [1.0, 0.0], "a": [1.0, 0.0], "new": [0.0, 0.0]}), seed=1)
    made = compare(before, after)
    (cells,) = made.cells
    assert made.seeds_match
    assert {pair.id: pair.change for pair in cells.tasks} == {
        "a": TaskChange.SAME,
        "b": TaskChange.GAINED,
        "c": TaskChange.LOST,
    }
    assert cells.pass_difference.value == pytest.approx((0 + 0.5 - 1) / 3)
    assert cells.pass_before == pytest.approx(0.5)
    assert cells.outcomes == PairCounts(both=1, only_before=2, only_after=1, neither=2)
    assert cells.unpaired == 2


@pytest.mark.parametrize(
    ("was", "now", "change"),
    [
        ([0.0, 0.0], [0.0, 1.0], TaskChange.GAINED),
        ([0.0, 1.0], [1.0, 1.0], TaskChange.BETTER),
        ([1.0, 1.0], [1.0, 0.0], TaskChange.WORSE),
        ([1.0, 0.0], [0.0, 0.0], TaskChange.LOST),
        ([1.0, 0.0], [0.0, 1.0], TaskChange.SAME),
    ],
)
def test_a_task_is_called_by_how_it_changed(was: list[float], now: list[float], change: TaskChange) -> None:
    (cells,) = compare(report(cell({"t": was})), report(cell({"t": now}))).cells
    assert cells.tasks[0].change is change


@given(outcomes, outcomes)
@settings(max_examples=50)
def test_comparing_the_other_way_round_only_turns_the_sign(
    one: dict[str, list[float | None]], other: dict[str, list[float | None]]
) -> None:
    if not one.keys() & other.keys():
        return
    first, second = report(cell(one)), report(cell(other))
    (there,), (back,) = compare(first, second).cells, compare(second, first).cells
    assert there.pass_difference.value == pytest.approx(-back.pass_difference.value)
    assert there.reward_difference.value == pytest.approx(-back.reward_difference.value)
    assert there.p == pytest.approx(back.p)
    assert there.outcomes.only_before == back.outcomes.only_after
    assert there.pass_after - there.pass_before == pytest.approx(there.pass_difference.value)


def test_a_run_does_not_differ_from_itself() -> None:
    made = report(cell({"a": [1.0, 0.0], "b": [0.0, 1.0]}))
    (cells,) = compare(made, made).cells
    assert cells.p == 1.0
    assert cells.pass_difference.value == cells.reward_difference.value == 0.0


TASKS = {"a": [1.0], "b": [0.0]}


def pairs(made: Comparison) -> set[tuple[str, str]]:
    return {(cells.before, cells.after) for cells in made.cells}


def test_harnesses_and_models_are_paired_with_their_own() -> None:
    before = report(cell(TASKS, harness="pi"), cell(TASKS, harness="codex"))
    after = report(cell(TASKS, harness="codex", model="trained"), cell(TASKS, harness="pi", model="trained"))
    assert pairs(compare(before, after)) == {
        ("pi · small", "pi · trained"),
        ("codex · small", "codex · trained"),
    }


def test_another_harness_with_the_same_model_is_compared() -> None:
    made = compare(report(cell(TASKS, harness="pi")), report(cell(TASKS, harness="codex")))
    assert pairs(made) == {("pi · small", "codex · small")}


def test_the_name_of_a_taskset_does_not_matter_but_its_tasks_do() -> None:
    assert compare(report(cell(TASKS, taskset="x")), report(cell(TASKS, taskset="y"))).cells
    with pytest.raises(InvalidInput, match="no task in common"):
        compare(report(cell(TASKS)), report(cell(TASKS, digest="asks something else")))


def test_runs_of_other_tasksets_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput) as error:
        compare(
            report(cell({"a": [1.0]}, taskset="one")), report(cell({"b": [1.0]}, taskset="two")), ("X", "Y")
        )
    said = str(error.value)
    assert said == "X and Y have no task in common (the first evaluated one, the second two)"


def test_runs_that_pass_at_other_rewards_are_refused() -> None:
    other = report(cell(TASKS)).model_copy(update={"threshold": 0.5})
    with pytest.raises(InvalidInput, match="--pass-reward"):
        compare(report(cell(TASKS)), other)
