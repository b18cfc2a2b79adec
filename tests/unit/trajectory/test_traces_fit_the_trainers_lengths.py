"""Length limits cut at whole turns, never inside a context, and what does not fit is counted."""

from __future__ import annotations

from typing import Any

import pytest

from polar.models.completion import Completion
from polar.models.trace import Trajectory
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow
from tests.fakes.sessions import completion
from tests.fakes.trace_oracle import assert_invariants, traces


def build(**options: Any) -> Trajectory:
    """Four turns of 10 given and 5 sampled tokens each."""
    completions: list[Completion] = []
    context: list[int] = []
    for turn in range(4):
        prompt = [*context, *range(10)]
        sampled = [20 + turn] * 5
        completions.append(completion(turn, prompt, sampled, parent=f"c{turn - 1}" if turn else None))
        context = [*prompt, *sampled]
    made = PrefixMerging(PrefixMerging.Options(**options)).build(grow(completions))
    assert_invariants(completions, made)
    return made


def shape(trajectory: Trajectory) -> list[tuple[int, int, tuple[str, ...]]]:
    return [(len(t.prompt_ids), len(t.response_ids), t.completion_ids) for t in traces(trajectory)]


@pytest.mark.parametrize("way", ["split", "truncate"])
def test_a_trace_ends_with_the_last_turn_that_fits_the_context(way: str) -> None:
    trajectory = build(max_tokens=44, on_overlong=way)
    assert shape(trajectory) == [(10, 20, ("c0", "c1"))]
    assert trajectory.stats.excluded == {"over_length": 10}


def test_a_long_response_is_split_into_traces_that_keep_their_whole_context() -> None:
    trajectory = build(max_response_tokens=20)
    assert shape(trajectory) == [(10, 20, ("c0", "c1")), (40, 20, ("c2", "c3"))]
    assert [ref.parent for ref in trajectory.traces] == [None, 0]
    assert trajectory.stats.excluded == {}
    assert (trajectory.stats.chains, trajectory.stats.traces) == (1, 2)


def test_a_long_response_is_cut_where_asked() -> None:
    trajectory = build(max_response_tokens=20, on_overlong="truncate")
    assert shape(trajectory) == [(10, 20, ("c0", "c1"))]
    assert trajectory.stats.excluded == {"over_length": 10}


def test_a_long_trace_is_dropped_where_asked() -> None:
    trajectory = build(max_tokens=50, on_overlong="drop")
    assert shape(trajectory) == []
    assert trajectory.stats.excluded == {"over_length": 20}


def test_a_turn_longer_than_the_response_is_left_out_and_never_cut() -> None:
    trajectory = build(max_response_tokens=4)
    assert shape(trajectory) == []
    assert trajectory.stats.excluded == {"over_length": 20}


def test_a_trace_that_just_fits_is_whole() -> None:
    assert shape(build(max_tokens=60, max_response_tokens=50)) == [(10, 50, ("c0", "c1", "c2", "c3"))]
