"""The statistics of an evaluation and their uncertainty: pure functions, with a fixed seed where they sample.

Tasks are a sample of a wider world of tasks, so every interval is over tasks: the samples of one task are not
independent and are never counted as if they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from polar.models.component import Frozen

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 0
"""Fixed, so that the same attempts always give the same report."""

_Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
CELLS_AT_ONCE = 2_000_000
"""The number of sampled values held in memory at once."""
EXACT_FLIPS = 14
"""Up to this many tasks that differ, all sign combinations are tried; beyond it, they are sampled."""

Values = NDArray[np.float64]


class Method(StrEnum):
    """How an interval was computed."""

    WILSON = "wilson"
    """Wilson's score interval, valid also at 0 and 1; used if every task either passed or failed."""
    BOOTSTRAP = "bootstrap"
    """Percentiles of means over tasks drawn with replacement; used if tasks have values in between."""
    NONE = "none"
    """There is no interval, since a single task says nothing about others."""


class Estimate(Frozen):
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    method: Method
    tasks: int

    @property
    def has_interval(self) -> bool:
        """Whether `low` and `high` are an interval; for a single task they equal the value."""
        return self.method is not Method.NONE


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The unbiased estimate of pass@k: the chance that at least one of k samples drawn at random passed."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} is undefined for {passed} passed out of {samples} samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_of_outcomes(values: Sequence[float]) -> Estimate | None:
    """Return the mean of one value between 0 and 1 per task; None without tasks."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    if np.isin(array, (0.0, 1.0)).all():
        low, high = wilson(int(array.sum()), len(array))
        return _estimate(array, low, high, Method.WILSON)
    return mean_of_values(values)


def mean_of_values(values: Sequence[float]) -> Estimate | None:
    """Return the mean of any value per task, with a bootstrap interval; None without tasks."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    if len(array) == 1:
        return _estimate(array, float(array[0]), float(array[0]), Method.NONE)
    low, high = bootstrap(array)
    return _estimate(array, low, high, Method.BOOTSTRAP)


def _estimate(values: Values, low: float, high: float, method: Method) -> Estimate:
    value = float(values.mean())
    # Rounding must not move the mean outside its own interval.
    return Estimate(value=value, low=min(low, value), high=max(high, value), method=method, tasks=len(values))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    rate, square = successes / trials, _Z**2
    centre = (rate + square / (2 * trials)) / (1 + square / trials)
    half = _Z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials**2)) / (1 + square / trials)
    # At 0 and 1 one end is the rate itself, which rounding would miss.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap(values: Values, resamples: int = RESAMPLES) -> tuple[float, float]:
    draw = np.random.default_rng(SEED)
    count = len(values)
    rows = max(1, CELLS_AT_ONCE // count)
    means = np.concatenate(
        [
            values[draw.integers(0, count, (min(rows, resamples - start), count))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided sign-flip test over tasks; with one sample per task it is McNemar's exact test."""
    moved = np.array([value for value in differences if value], np.float64)
    if not len(moved):
        return 1.0
    observed = abs(moved.sum())
    # Sums that differ only by rounding count as equal.
    slack = 1e-9 * np.abs(moved).sum()
    if len(moved) <= EXACT_FLIPS:
        sums = np.zeros(1)
        for value in moved:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed - slack).mean())
    draw = np.random.default_rng(SEED)
    hits = 0
    rows = max(1, CELLS_AT_ONCE // len(moved))
    for start in range(0, RESAMPLES, rows):
        signs = draw.choice((-1.0, 1.0), (min(rows, RESAMPLES - start), len(moved)))
        hits += int((np.abs(signs @ moved) >= observed - slack).sum())
    # The observed signs are one of the combinations, so the probability is never 0.
    return (hits + 1) / (RESAMPLES + 1)
