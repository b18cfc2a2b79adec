"""One step of learning: the gradient of a step's batches, and the optimizer's updates with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polar.errors import PolarError
from polar.training.objective import Loss, Measured
from polar.training.policy import TrainerPolicy
from polar.training.settings import ADAPTER_LR, FULL_LR, DivergenceLimits, OptimizerSettings
from polar.trajectory.packing.batch import Batch

LossOf = Callable[[Batch, Measured], Loss]


class Diverged(PolarError):
    """The run has left the range in which it can learn."""


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
        has_reference: bool = False,
    ) -> None:
        self.policy = policy
        self._loss = loss
        self._settings = settings
        self._limits = limits
        self._has_reference = has_reference
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

    def learn(self, batches: Sequence[Batch]) -> dict[str, float]:
        """Make the step's updates; a step without a trained token makes none."""
        numbers = {"lr": self.lr * self._share(self._steps)}
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = numbers["lr"]
        batches = [batch for batch in batches if len(batch.terms)]
        if batches:
            olds = self._olds(batches)
            references = [self._reference(batch) for batch in batches]
            for _ in range(self._settings.updates):
                numbers |= self._update(batches, olds, references)
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

    def _olds(self, batches: Sequence[Batch]) -> list[Tensor | None]:
        """The reference logprobs of ratios; the first update's own if there is only one update."""
        if self._settings.updates == 1:
            return [None] * len(batches)
        return [self.policy.logprobs(batch) for batch in batches]

    def _reference(self, batch: Batch) -> Tensor | None:
        return self.policy.reference_logprobs(batch) if self._has_reference else None

    def _update(
        self, batches: Sequence[Batch], olds: Sequence[Tensor | None], references: Sequence[Tensor | None]
    ) -> dict[str, float]:
        losses: list[Loss] = []
        for batch, old, reference in zip(batches, olds, references, strict=True):
            loss = self._loss(batch, Measured(*self.policy.measure(batch), old, reference))
            loss.value.backward()
            losses.append(Loss(loss.value.detach(), loss.sums))
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters, self._settings.max_grad_norm)
        numbers = _numbers(losses, norm, sum(len(batch.terms) for batch in batches))
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
    values = torch.stack([total.float() for total in totals.values()]).tolist()
    found = dict(zip(totals, values, strict=True))
    return {name: value / terms if name in sums else value for name, value in found.items()}


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
