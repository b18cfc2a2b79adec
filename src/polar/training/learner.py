"""One step of learning: the gradient of a step's batches, and the optimizer's updates with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polar.errors import PolarError
from polar.training.head import to_device
from polar.training.material import Material, PolicyVersions
from polar.training.objective import Loss, Measured
from polar.training.policy import TrainerPolicy
from polar.training.settings import ADAPTER_LR, FULL_LR, DivergenceLimits, OptimizerSettings
from polar.trajectory.packing.batch import Batch

LossOf = Callable[[Batch, Measured], Loss]
Reference = Callable[[Sequence[Batch]], list[Tensor]]
"""Logprobs of the terms of each batch under another policy."""


class Diverged(PolarError):
    """The run has left the range in which it can learn."""


class Prepared(NamedTuple):
    """A batch, and what other policies than the trainer's current one say of its terms."""

    batch: Batch
    old: Tensor | None
    reference: Tensor | None
    ages: Tensor


class Learner:
    """A policy with its optimizer."""

    def __init__(
        self,
        policy: TrainerPolicy,
        loss: LossOf,
        settings: OptimizerSettings,
        limits: DivergenceLimits,
        steps: int,
        *,
        reference: Reference | None = None,
    ) -> None:
        """`reference` computes the logprobs of the policy that the KL divergence is taken to."""
        self.policy = policy
        self._loss = loss
        self._settings = settings
        self._limits = limits
        self._reference = reference
        self.lr = settings.lr or (ADAPTER_LR if policy.is_adapter else FULL_LR)
        """The learning rate after warm-up."""
        self._optimizer = torch.optim.AdamW(
            policy.parameters,
            lr=self.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=policy.device.type == "cuda",
        )
        self._share = _schedule(settings, steps)
        self._steps = 0

    def learn(self, material: Material) -> dict[str, float]:
        """Make the step's updates, one per minibatch and pass; a step without a trained token makes none.

        Numbers are means over the minibatches of the last pass.
        """
        numbers = {"lr": self.lr * self._share(self._steps)}
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = numbers["lr"]
        parts = [[batch for batch in one.batches if len(batch.terms)] for one in material.minibatches]
        minibatches = self._prepare([part for part in parts if part], material.versions)
        for _ in range(self._settings.updates if minibatches else 0):
            found = [self._update(batches) for batches in minibatches]
            names = dict.fromkeys(name for one in found for name in one)
            numbers |= {name: fmean(one[name] for one in found if name in one) for name in names}
        self._steps += 1
        return numbers

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "steps": self._steps}

    def restore(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        # The state includes the settings it was made with; the current ones apply.
        for parameters in self._optimizer.param_groups:
            parameters.update(betas=self._settings.betas, weight_decay=self._settings.weight_decay)
        self._steps = state["steps"]

    def _prepare(
        self, minibatches: Sequence[Sequence[Batch]], versions: PolicyVersions
    ) -> list[list[Prepared]]:
        """Compute what stays the same in all of the step's updates, before the first."""
        batches = [batch for minibatch in minibatches for batch in minibatch]
        # The policy before the only update is the one that it measures.
        has_old = self._settings.updates * len(minibatches) > 1
        olds = [self.policy.logprobs(batch) if has_old else None for batch in batches]
        references = self._reference(batches) if self._reference else [None] * len(batches)
        ages = (to_device(versions.staleness(it.terms.versions), self.policy.device) for it in batches)
        prepared = map(Prepared, batches, olds, references, ages)
        return [list(islice(prepared, len(minibatch))) for minibatch in minibatches]

    def _update(self, batches: Sequence[Prepared]) -> dict[str, float]:
        losses: list[Loss] = []
        for one in batches:
            measured = Measured(*self.policy.measure(one.batch), one.old, one.reference, one.ages)
            loss = self._loss(one.batch, measured)
            loss.value.backward()
            losses.append(replace(loss, value=loss.value.detach()))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters, self._settings.max_grad_norm)
        numbers = _numbers(losses, norm, sum(len(one.batch.terms) for one in batches))
        self._check(numbers)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return numbers

    def _check(self, numbers: dict[str, float]) -> None:
        """Raise before an update that would spoil the weights."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(numbers[name]):
                raise Diverged(f"the {name} is {numbers[name]}")
        for name, limit in (("loss", self._limits.loss), ("behaviour_kl", self._limits.behaviour_kl)):
            if limit is not None and numbers.get(name, 0.0) > limit:
                raise Diverged(f"{name} is {numbers[name]:.4g}, above its limit of {limit:g}")


def _numbers(losses: Sequence[Loss], norm: Tensor, terms: int) -> dict[str, float]:
    """Sum losses and average other numbers over terms. Synchronises with the GPU once."""
    sums = {name: torch.stack([loss.sums[name].float() for loss in losses]).sum() for name in losses[0].sums}
    totals = {"loss": torch.stack([loss.value for loss in losses]).sum(), "grad_norm": norm} | sums
    pairs = [
        torch.stack([loss.partial_sums[name] for loss in losses]).sum(0) for name in losses[0].partial_sums
    ]
    together = torch.cat([torch.stack([total.double() for total in totals.values()]), *pairs]).tolist()
    found = dict(zip(totals, together, strict=False))
    numbers = {name: value / terms if name in sums else value for name, value in found.items()}
    of_some = zip(losses[0].partial_sums, *(together[len(totals) + at :: 2] for at in (0, 1)), strict=True)
    return numbers | {name: total / count for name, total, count in of_some if count}


def _schedule(settings: OptimizerSettings, steps: int) -> Callable[[int], float]:
    def share(step: int) -> float:
        """Share of the learning rate at a step counted from 0."""
        if step < settings.warmup_steps:
            return (step + 1) / (settings.warmup_steps + 1)
        done = (step - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
        match settings.schedule:
            case "constant":
                return 1.0
            case "linear":
                return max(0.0, 1 - done)
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return share
