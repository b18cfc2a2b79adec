"""The numbers of an evaluation and how sure they are: pure functions of counts, seeded where they draw.

Tasks are what an evaluation samples from a wider world of tasks, so every interval is one over tasks:
the samples of one task are not independent of each other and are never counted as if they were.
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
_CELLS_AT_ONCE = 2_000_000
"""How many drawn values are held in memory together."""
_EXACT_FLIPS = 14
"""Up to this many tasks that differ, every sign is tried; beyond, signs are drawn."""

Values = NDArray[np.float64]


class Method(StrEnum):
    """How an interval was made."""

    WILSON = "wilson"
    """Every task is plainly passed or failed: Wilson's score interval, sound also at 0 and 1."""
    BOOTSTRAP = "bootstrap"
    """Tasks have values between: percentiles of means over tasks drawn with replacement."""
    NONE = "none"
    """One task alone says nothing of others."""


class Estimate(Frozen):
    """A mean over tasks with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    method: Method
    tasks: int
    """Over how many tasks."""

    @property
    def has_interval(self) -> bool:
        """Whether `low` and `high` say anything: they are the value itself where one task is all there is."""
        return self.method is not Method.NONE


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The chance that of k samples drawn without replacement at least one passed: unbiased for pass@k."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed in {samples} samples does not exist")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_of_outcomes(values: Sequence[float]) -> Estimate | None:
    """The mean of what lies between 0 and 1 for each task; None without tasks."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    if np.isin(array, (0.0, 1.0)).all():
        low, high = wilson(int(array.sum()), len(array))
        return _estimate(array, low, high, Method.WILSON)
    return mean_of_values(values)


def mean_of_values(values: Sequence[float]) -> Estimate | None:
    """The mean of any number a task, with a bootstrap interval; None without tasks."""
    if not values:
        return None
    array = np.asarray(values, np.float64)
    if len(array) == 1:
        return _estimate(array, float(array[0]), float(array[0]), Method.NONE)
    low, high = bootstrap(array)
    return _estimate(array, low, high, Method.BOOTSTRAP)


def _estimate(values: Values, low: float, high: float, method: Method) -> Estimate:
    value = float(values.mean())
    # Rounding must not put the mean outside of its own interval.
    return Estimate(value=value, low=min(low, value), high=max(high, value), method=method, tasks=len(values))


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion."""
    rate, square = successes / trials, _Z**2
    centre = (rate + square / (2 * trials)) / (1 + square / trials)
    half = _Z * math.sqrt(rate * (1 - rate) / trials + square / (4 * trials**2)) / (1 + square / trials)
    # At 0 and 1 an end is the rate itself, which rounding would miss.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap(values: Values, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Percentiles of the means of tasks drawn with replacement."""
    draw = np.random.default_rng(SEED)
    count = len(values)
    rows = max(1, _CELLS_AT_ONCE // count)
    means = np.concatenate(
        [
            values[draw.integers(0, count, (min(rows, resamples - start), count))].mean(axis=1)
            for start in range(0, resamples, rows)
        ]
    )
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float]) -> float:
    """How often differences this large come about if each could as well have had the other sign.

    Two-sided, over tasks. With one sample a task, passed or failed, it is McNemar's exact test.
    """
    moved = np.array([value for value in differences if value], np.float64)
    if not len(moved):
        return 1.0
    observed = abs(moved.sum())
    # Sums that only rounding tells apart are the same sum.
    slack = 1e-9 * np.abs(moved).sum()
    if len(moved) <= _EXACT_FLIPS:
        sums = np.zeros(1)
        for value in moved:
            sums = np.concatenate([sums + value, sums - value])
        return float((np.abs(sums) >= observed - slack).mean())
    draw = np.random.default_rng(SEED)
    hits = 0
    rows = max(1, _CELLS_AT_ONCE // len(moved))
    for start in range(0, RESAMPLES, rows):
        signs = draw.choice((-1.0, 1.0), (min(rows, RESAMPLES - start), len(moved)))
        hits += int((np.abs(signs @ moved) >= observed - slack).sum())
    # The order observed is one of those possible: the chance is never 0.
    return (hits + 1) / (RESAMPLES + 1)
