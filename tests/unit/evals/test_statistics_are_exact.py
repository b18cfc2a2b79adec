"""Estimates are what enumeration gives, and intervals hold what they promise."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.evals import statistics
from polar.evals.statistics import (
    Method,
    bootstrap,
    mean_of_outcomes,
    mean_of_values,
    pass_at_k,
    sign_flip_p,
    wilson,
)

counts = st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(counts, st.data())
def test_pass_at_k_is_what_drawing_k_samples_gives(
    given_counts: tuple[int, int], data: st.DataObject
) -> None:
    samples, passed = given_counts
    k = data.draw(st.integers(1, samples))
    outcomes = [True] * passed + [False] * (samples - passed)
    draws = [any(draw) for draw in combinations(outcomes, k)]
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


@given(counts)
def test_pass_at_k_never_falls_with_k(given_counts: tuple[int, int]) -> None:
    samples, passed = given_counts
    values = [pass_at_k(samples, passed, k) for k in range(1, samples + 1)]
    assert values == sorted(values)
    assert values[0] == pytest.approx(passed / samples)
    assert values[-1] == (1.0 if passed else 0.0)


@given(st.floats(0.05, 0.95), st.integers(1, 3))
@settings(max_examples=10)
def test_pass_at_k_is_unbiased(chance: float, k: int) -> None:
    samples = 4
    weights = [math.comb(samples, c) * chance**c * (1 - chance) ** (samples - c) for c in range(samples + 1)]
    expected = sum(weight * pass_at_k(samples, c, k) for c, weight in enumerate(weights))
    assert expected == pytest.approx(1 - (1 - chance) ** k)


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)])
def test_pass_at_k_of_impossible_counts_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="is undefined"):
        pass_at_k(samples, passed, k)


def test_many_samples_do_not_overflow() -> None:
    assert pass_at_k(1024, 1, 512) == pytest.approx(0.5)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilsons_ends_are_where_the_score_test_turns(outcome: tuple[int, int]) -> None:
    successes, trials = outcome
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            score = abs(successes / trials - end) / math.sqrt(end * (1 - end) / trials)
            assert score == pytest.approx(1.959964, abs=1e-4)


def test_all_passed_is_not_taken_for_certainty() -> None:
    estimate = mean_of_outcomes([1.0] * 10)
    assert estimate is not None
    assert (estimate.value, estimate.high, estimate.method) == (1.0, 1.0, Method.WILSON)
    assert estimate.low == pytest.approx(0.7225, abs=1e-3)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30))
@settings(max_examples=30)
def test_an_interval_holds_its_mean_and_never_changes(values: list[float]) -> None:
    estimate = mean_of_values(values)
    assert estimate is not None
    assert estimate == mean_of_values(values)
    assert estimate.low <= estimate.value <= estimate.high
    assert min(values) - 1e-9 <= estimate.low
    assert estimate.high <= max(values) + 1e-9
    assert (estimate.method is Method.NONE) == (len(values) == 1)


def test_no_tasks_have_no_mean() -> None:
    assert mean_of_outcomes([]) is None
    assert mean_of_values([]) is None


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_hold_the_truth_about_as_often_as_they_say(samples: int) -> None:
    """40 tasks of different difficulty, evaluated 300 times: the true mean lies inside in about 95 %."""
    draw = np.random.default_rng(5)
    held = 0
    for _ in range(300):
        chances = draw.beta(0.8, 1.2, 40)
        passed = draw.binomial(samples, chances)
        estimate = mean_of_outcomes([pass_at_k(samples, int(c), 1) for c in passed])
        assert estimate is not None
        held += estimate.low <= 0.4 <= estimate.high
    assert 0.90 <= held / 300 <= 0.99


def test_drawing_in_pieces_gives_the_same_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.linspace(0, 1, 50)
    whole = bootstrap(values, resamples=1000)
    monkeypatch.setattr(statistics, "CELLS_AT_ONCE", 777)
    assert bootstrap(values, resamples=1000) == whole


@given(st.integers(0, 7), st.integers(0, 7))
def test_sign_flips_of_single_samples_are_mcnemars_exact_test(only_before: int, only_after: int) -> None:
    moved = only_before + only_after
    fewer = min(only_before, only_after)
    tail = sum(math.comb(moved, i) for i in range(fewer + 1)) / 2**moved
    exact = min(1.0, 2 * tail)
    differences = [-1.0] * only_before + [1.0] * only_after + [0.0] * 5
    assert sign_flip_p(differences) == pytest.approx(exact)


def test_many_flips_are_drawn_close_to_the_exact_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    differences = [0.25, -0.5, 1.0, 0.75, 0.25, 0.5, -0.25, 1.0, 0.5, 0.25]
    exact = sign_flip_p(differences)
    monkeypatch.setattr(statistics, "EXACT_FLIPS", 3)
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.01)


def test_no_difference_has_no_significance() -> None:
    assert sign_flip_p([0.0, 0.0]) == 1.0
