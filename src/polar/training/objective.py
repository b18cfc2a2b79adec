"""The losses, as sums over the terms of a packed batch.

Each term carries its own weight, so how rows fall into batches, and whether they share tokens, changes
neither loss nor gradient: add both up over the batches of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polar.training.head import to_device
from polar.training.settings import MOST_TOKEN_KL, ObjectiveSettings
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
    """Logprobs of the policy that the KL divergence is taken to."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A batch's contribution to the step's loss, and sums over its terms for metrics."""

    value: Tensor
    sums: dict[str, Tensor]


def policy_loss(batch: Batch, measured: Measured, settings: ObjectiveSettings) -> Loss:
    """The clipped surrogate, corrected for having been sampled by another policy than the trainer's.

    Three policies: the one that sampled (recorded, of whatever version each token is), the trainer's
    before this step's updates (old), and the trainer's now. Clipping holds `now` near `old`; what `old`
    differs from the recorded one is importance-weighted, truncated so that no token counts too much.
    """
    terms, now = batch.terms, measured.logprobs
    weights, advantages, recorded = (
        to_device(array, now.device) for array in (terms.weights, terms.advantages, terms.logprobs)
    )
    old = now.detach() if measured.old is None else measured.old
    importance = _ratio(old, recorded)
    ratio = _ratio(now, old)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    value = -(weights * importance.clamp(max=settings.max_importance) * surrogate).sum()
    sums = {
        "entropy": measured.entropy.detach().sum(),
        "behaviour_kl": _divergence(recorded, now.detach()).clamp(max=MOST_TOKEN_KL).sum(),
        "clip_fraction": (clipped * advantages < ratio * advantages).detach().sum(),
        "tis_fraction": (importance > settings.max_importance).sum(),
    }
    if settings.entropy:
        value = value - settings.entropy * (weights * measured.entropy).sum()
    if measured.reference is not None:
        divergence = _divergence(now, measured.reference)
        value = value + settings.kl * (weights * divergence).sum()
        sums["kl"] = divergence.detach().sum()
    return Loss(value, sums)


def likelihood_loss(batch: Batch, measured: Measured) -> Loss:
    """The negative log-likelihood: fine-tuning on what was sampled."""
    weights = to_device(batch.terms.weights, measured.logprobs.device)
    sums = {"entropy": measured.entropy.detach().sum()}
    return Loss(-(weights * measured.logprobs).sum(), sums)


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    return (over - under).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO).exp()


def _divergence(here: Tensor, there: Tensor) -> Tensor:
    """An estimate of KL(here, there) from tokens sampled here: unbiased, and never below zero."""
    log_ratio = (there - here).clamp(-MOST_LOG_RATIO, MOST_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1
