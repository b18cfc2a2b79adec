"""The losses, as sums over the terms of a packed batch.

Each term carries its own weight, so how rows fall into batches, and whether they share tokens, changes
neither loss nor gradient: add both up over the batches of a step. What is of a whole trace, such as the ratio
of a sequence, is computed from the terms of its row, which always lie in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from polar.training.head import to_device
from polar.training.settings import (
    MOST_TOKEN_KL,
    KlEstimator,
    KlPlace,
    ObjectiveSettings,
    OldPolicy,
    Outliers,
    Surrogate,
    Unit,
)
from polar.trajectory.packing.batch import Batch

MOST_LOG_RATIO = 20.0
"""Larger ratios carry no information, and their exponential would overflow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The trainer policy's values on a batch, one entry per term."""

    logprobs: Tensor
    entropy: Tensor
    old: Tensor | None = None
    """Logprobs before the first update with these terms; None: this is the first."""
    reference: Tensor | None = None
    """Logprobs of the policy that the KL divergence is taken to; NaN for tokens that it has none for."""
    ages: Tensor | None = None
    """Updates between the policy that sampled a token and the trainer's, for metrics."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A batch's contribution to the step's loss, and sums over its terms for metrics."""

    value: Tensor
    sums: dict[str, Tensor]
    partial_sums: dict[str, Tensor] = field(default_factory=dict)
    """Sums over some of the terms, each with the number of these."""


class _Traces:
    """Sums over the terms of each trace, given to each of them.

    In double precision, so that a trace's neighbours in the batch change nothing.
    """

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._rows = to_device(batch.terms.rows, device)
        self._count = len(batch.names)

    def total(self, values: Tensor) -> Tensor:
        return self._totals(values)[self._rows].to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.total(torch.ones_like(values))

    def rest(self, values: Tensor) -> Tensor:
        """The sum over a term and the later ones of its trace."""
        before = values.double().cumsum(0) - values
        return (self._totals(values).cumsum(0)[self._rows] - before).to(values.dtype)

    def _totals(self, values: Tensor) -> Tensor:
        empty = values.new_zeros(self._count, dtype=torch.float64)
        return empty.index_add(0, self._rows, values.double())


def policy_loss(batch: Batch, measured: Measured, settings: ObjectiveSettings) -> Loss:
    """The surrogate, corrected for having been sampled by another policy than the trainer's.

    Three policies: the one that sampled (recorded, of whatever version each token is), the trainer's
    before this step's updates (old, unless that is the recorded one too), and the trainer's now. Clipping
    holds `now` near `old`; what `old` differs from the recorded one is importance-weighted, within a band so
    that no token counts too much.
    """
    terms, now = batch.terms, measured.logprobs
    weights, advantages, recorded = (
        to_device(array, now.device) for array in (terms.weights, terms.advantages, terms.logprobs)
    )
    before = now.detach() if measured.old is None else measured.old
    old = recorded if settings.old is OldPolicy.RECORDED else before
    traces = _Traces(batch, now.device)
    importance, is_outside = _importance(old - recorded, traces, settings)
    divergence, told = _divergence(measured, old, settings)
    if settings.kl_in is KlPlace.ADVANTAGE:
        advantages = advantages - divergence
    elif settings.kl_in is KlPlace.REWARD:
        advantages = advantages - traces.rest(divergence)
    surrogate, is_clipped = _surrogate(now, _policy_ratio(now, old, traces, settings), advantages, settings)
    value = -(weights * importance * surrogate).sum()
    if settings.kl_in is KlPlace.LOSS:
        value = value + (weights * divergence).sum()
    if settings.entropy:
        value = value - settings.entropy * (weights * measured.entropy).sum()
    sums = {
        "entropy": measured.entropy.detach().sum(),
        "behaviour_kl": _estimate(recorded - now.detach(), KlEstimator.K3).clamp(max=MOST_TOKEN_KL).sum(),
        "clip_fraction": is_clipped.sum(),
        _OUTSIDE[settings.outliers]: is_outside.sum(),
    }
    mismatch = before - recorded
    return Loss(value, sums, told | _by_age(mismatch, measured.ages) | _by_position(mismatch, batch))


def likelihood_loss(batch: Batch, measured: Measured) -> Loss:
    """The negative log-likelihood: fine-tuning on what was sampled."""
    weights = to_device(batch.terms.weights, measured.logprobs.device)
    sums = {"entropy": measured.entropy.detach().sum()}
    return Loss(-(weights * measured.logprobs).sum(), sums)


_OUTSIDE = {Outliers.TRUNCATE: "tis_fraction", Outliers.MASK: "masked_fraction"}


def _importance(log_ratio: Tensor, traces: _Traces, settings: ObjectiveSettings) -> tuple[Tensor, Tensor]:
    """The weight of each term for being sampled by another policy, and whether its ratio left the band."""
    ratio = _exp(traces.total(log_ratio) if settings.importance is Unit.TRACE else log_ratio)
    least, most = settings.min_importance, settings.max_importance
    is_outside = (ratio < least) | (ratio > most)
    if settings.outliers is Outliers.MASK:
        return torch.where(is_outside, 0.0, ratio), is_outside
    return ratio.clamp(least, most), is_outside


def _divergence(
    measured: Measured, old: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted KL divergence of each term to the reference policy, and its sum for metrics, over the
    tokens that the reference policy has scored."""
    if measured.reference is None:
        return torch.zeros_like(old), {}
    apart = (measured.logprobs if settings.kl_in is KlPlace.LOSS else old) - measured.reference
    # Of a token that the reference policy has not scored nothing is known, so nothing is taken.
    is_scored = ~measured.reference.isnan()
    apart = torch.where(is_scored, apart, 0.0)
    found = settings.kl * _estimate(apart, settings.estimator)
    return found, {"kl": _pair(_estimate(apart.detach(), KlEstimator.K3), is_scored)}


def _policy_ratio(now: Tensor, old: Tensor, traces: _Traces, settings: ObjectiveSettings) -> Tensor:
    if settings.ratio is Unit.TOKEN:
        return _exp(now - old)
    # The value is the trace's, the gradient the token's own: with one advantage they add up to the trace's,
    # and with several each token is credited with its own.
    return _exp(traces.mean((now - old).detach())) * (now - now.detach()).exp()


def _surrogate(
    now: Tensor, ratio: Tensor, advantages: Tensor, settings: ObjectiveSettings
) -> tuple[Tensor, Tensor]:
    """What is to be maximised of each term, and whether clipping changed it."""
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    match settings.surrogate:
        case Surrogate.CLIPPED:
            found = torch.minimum(ratio * advantages, clipped * advantages)
            return found, (clipped * advantages < ratio * advantages).detach()
        case Surrogate.WEIGHTED:
            return clipped.detach() * advantages * now, (clipped != ratio).detach()
        case Surrogate.PLAIN:
            return ratio * advantages, torch.zeros_like(ratio, dtype=torch.bool)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _estimate(log_ratio: Tensor, kind: KlEstimator) -> Tensor:
    """KL(p, q) from log p − log q of tokens sampled from p."""
    log_ratio = log_ratio.clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    match kind:
        case KlEstimator.K1:
            return log_ratio
        case KlEstimator.K2:
            return log_ratio**2 / 2
        case KlEstimator.K3:
            return (-log_ratio).exp() + log_ratio - 1


LOWER_TAILS, UPPER_TAILS = (0.5, 0.8), (1.25, 2.0)
"""Ratios of trainer to recorded policy beyond which tokens are counted."""
OLDEST = 3
"""Age in policy updates from which tokens are counted together."""
POSITIONS = (0, 1024, 4096, 16_384)
"""Where ranges of positions in a trace begin."""


def _by_age(log_ratio: Tensor, ages: Tensor | None) -> dict[str, Tensor]:
    """The tails of the importance ratio's distribution, by age in policy updates."""
    if ages is None:
        return {}
    ratio = log_ratio.exp()
    tails = {f"under-{end:g}": ratio < end for end in LOWER_TAILS}
    tails |= {f"over-{end:g}": ratio > end for end in UPPER_TAILS}
    of_age = {f"importance/age-{age}": ages.clamp(0, OLDEST) == age for age in range(OLDEST + 1)}
    return {
        f"{name}/{tail}": _pair(is_there, is_of_age)
        for name, is_of_age in of_age.items()
        for tail, is_there in tails.items()
    }


def _by_position(log_ratio: Tensor, batch: Batch) -> dict[str, Tensor]:
    """How far the logprobs of trainer and engine are apart, by position in the trace."""
    positions = to_device(batch.positions[batch.terms.targets], log_ratio.device)
    # The last range has no end.
    return {
        f"mismatch/position-{first}": _pair(
            log_ratio.abs(), (positions >= first) & ((positions < end) | (first == POSITIONS[-1]))
        )
        for first, end in pairwise((*POSITIONS, POSITIONS[-1]))
    }


def _pair(values: Tensor, is_counted: Tensor) -> Tensor:
    """The sum over the counted terms, and their number."""
    return torch.stack([torch.where(is_counted, values, 0).sum(), is_counted.sum()]).double()
