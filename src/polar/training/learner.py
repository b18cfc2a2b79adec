"""One step of learning: its batches dealt to ranks, their gradient, and the optimizer's updates with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polar.errors import PolarError
from polar.training import checkpoint
from polar.training.checkpoint import Checkpoint
from polar.training.head import to_device
from polar.training.material import Material
from polar.training.objective import Loss, Measured
from polar.training.policy import TrainerPolicy
from polar.training.ranks import Collective, Pair, Ranks
from polar.training.settings import ADAPTER_LR, FULL_LR, DivergenceLimits, OptimizerSettings
from polar.training.sharding import optimizer_part, restore_optimizer, whole
from polar.trajectory.packing.batch import Batch, Floats, Terms

LossOf = Callable[[Batch, Measured], Loss]
ScoresOf = Callable[[Sequence[Batch]], list[Floats]]
"""Logprobs of the terms of each batch under a policy that is elsewhere."""


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
        has_reference: bool = False,
        teacher: ScoresOf | None = None,
    ) -> None:
        """The KL divergence is taken to the initial policy, or to the teacher, whom only rank 0 has."""
        self.policy = policy
        self._ranks = policy.ranks
        self._loss = loss
        self._settings = settings
        self._limits = limits
        self._has_reference = has_reference
        self._teacher = teacher
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
        """Make the step's updates with rank 0's material, one per minibatch and pass; a step without a
        trained token makes none.

        Numbers are means over the minibatches of the last pass.
        """
        known = self._known(material)
        self._ranks.order(Collective.LEARN)
        dealt = deal(known, self._ranks, self.policy.pairs_per_token)
        numbers = {"lr": self.lr * self._share(self._steps)} | dealt.numbers
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = numbers["lr"]
        minibatches = self._prepare(dealt.minibatches)
        for _ in range(self._settings.updates if minibatches else 0):
            found = [self._update(batches) for batches in minibatches]
            names = dict.fromkeys(name for one in found for name in one)
            numbers |= {name: fmean(one[name] for one in found if name in one) for name in names}
        self._steps += 1
        return numbers

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def keep(self, directory: Path) -> None:
        """Write every rank's part of the optimizer's state, and its random generators."""
        self._ranks.order(Collective.KEEP, directory)
        optimizer = optimizer_part(self._optimizer, self.policy.trained)
        part = {"optimizer": optimizer, "random": checkpoint.random_state()}
        checkpoint.write_part(directory, self._ranks.rank, part)
        self._ranks.wait()

    def restore(self, found: Checkpoint) -> None:
        """Take this rank's part of a checkpoint that any number of ranks has written."""
        self._steps = found.state()["learner"]["steps"]
        parts = found.parts()
        restore_optimizer(self._optimizer, self.policy.trained, [part["optimizer"] for part in parts])
        if self._ranks.rank < len(parts):
            checkpoint.restore_random(parts[self._ranks.rank]["random"])

    def _known(self, material: Material) -> list[list[Dealt]]:
        """What there is to deal. A teacher is asked for all ranks, which wait without a deadline so far."""
        parts = [[batch for batch in one.batches if len(batch.terms)] for one in material.minibatches]
        batches = [batch for part in parts for batch in part]
        ages = (material.versions.staleness(batch.terms.versions) for batch in batches)
        scores = self._teacher(batches) if self._teacher else [None] * len(batches)
        known = map(Dealt, batches, ages, scores)
        return [list(islice(known, len(part))) for part in parts if part]

    def _prepare(self, minibatches: Sequence[Sequence[Dealt]]) -> list[list[Prepared]]:
        """Compute what stays the same in all of the step's updates, before the first."""
        dealt = [one for minibatch in minibatches for one in minibatch]
        # The policy before the only update is the one that it measures.
        has_old = self._settings.updates * len(minibatches) > 1
        olds = [self.policy.logprobs(one.batch) if has_old else None for one in dealt]
        references = [self._reference(one) for one in dealt]
        ages = (to_device(one.ages, self.policy.device) for one in dealt)
        prepared = map(Prepared, (one.batch for one in dealt), olds, references, ages)
        return [list(islice(prepared, len(minibatch))) for minibatch in minibatches]

    def _reference(self, dealt: Dealt) -> Tensor | None:
        if self._has_reference:
            return self.policy.reference_logprobs(dealt.batch)
        return None if dealt.scores is None else to_device(dealt.scores, self.policy.device)

    def _update(self, batches: Sequence[Prepared]) -> dict[str, float]:
        losses: list[Loss] = []
        for one in batches:
            measured = Measured(*self.policy.measure(one.batch), one.old, one.reference, one.ages)
            loss = self._loss(one.batch, measured)
            loss.value.backward()
            losses.append(replace(loss, value=loss.value.detach()))
        norm = whole(torch.nn.utils.clip_grad_norm_(self.policy.parameters, self._settings.max_grad_norm))
        numbers = self._numbers(losses, norm, sum(len(one.batch.terms) for one in batches))
        self._check(numbers)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return numbers

    def _numbers(self, losses: Sequence[Loss], norm: Tensor, terms: int) -> dict[str, float]:
        """Sum losses over all ranks, and average other numbers over the terms that they are of."""
        totals, partial = _read(losses, norm)
        once = float(self._ranks.leads)
        counts = {"loss": once, "grad_norm": once}
        sums = {name: (total, counts.get(name, float(terms))) for name, total in totals.items()} | partial
        if not self._ranks.leads:
            # It is of all ranks already.
            del sums["grad_norm"]
        return {name: total / count for name, (total, count) in self._ranks.add_up(sums).items() if count}

    def _check(self, numbers: dict[str, float]) -> None:
        """Raise before an update that would spoil the weights."""
        for name in ("loss", "grad_norm"):
            if not math.isfinite(numbers[name]):
                raise Diverged(f"the {name} is {numbers[name]}")
        for name, limit in (("loss", self._limits.loss), ("behaviour_kl", self._limits.behaviour_kl)):
            if limit is not None and numbers.get(name, 0.0) > limit:
                raise Diverged(f"{name} is {numbers[name]:.4g}, above its limit of {limit:g}")


def _read(losses: Sequence[Loss], norm: Tensor) -> tuple[dict[str, float], dict[str, Pair]]:
    """Sums over all terms, and pairs of those over some. Synchronises with the GPU once."""
    sums = [{name: total.float() for name, total in loss.sums.items()} for loss in losses]
    totals = {"loss": torch.stack([loss.value for loss in losses]).sum(), "grad_norm": norm} | _add(sums)
    pairs = _add([loss.partial_sums for loss in losses])
    together = torch.cat([torch.stack([total.double() for total in totals.values()]), *pairs.values()])
    found = iter(together.tolist())
    ours = dict(zip(totals, islice(found, len(totals)), strict=True))
    return ours, dict(zip(pairs, zip(found, found, strict=True), strict=True))


def _add(sums: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add what has one name; a batch that nothing is learnt from lacks some."""
    names = dict.fromkeys(name for one in sums for name in one)
    return {name: torch.stack([one[name] for one in sums if name in one]).sum(0) for name in names}


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


_ZERO, _ONE = np.zeros(1, np.int32), np.ones(1, np.int32)
_NO_INDICES, _NO_FLOATS = np.empty(0, np.int64), np.empty(0, np.float32)
_NO_TERMS = Terms(_NO_INDICES, _NO_INDICES, _NO_FLOATS, _NO_FLOATS, _NO_FLOATS, _ZERO[:0])
EMPTY = Batch(_ZERO, _ZERO, _ZERO, predecessors=-_ONE, ends=_ONE, terms=_NO_TERMS, names=())
"""One token that nothing is learnt from, for a rank that has no batch for a pass which the others make."""


class Dealt(NamedTuple):
    """A batch, and what rank 0 alone knows of its terms."""

    batch: Batch
    ages: NDArray[np.integer]
    """Updates between the policy that sampled a token and the trainer's."""
    scores: Floats | None = None
    """Logprobs under the teacher, if there is one."""


NOTHING = Dealt(EMPTY, _NO_INDICES)


@dataclass(frozen=True, slots=True)
class Deal:
    """What one rank has of each minibatch; of each, all ranks have the same number of batches."""

    minibatches: list[list[Dealt]]
    numbers: dict[str, float] = field(default_factory=dict)
    """How many passes are empty, and how well the others are balanced; nothing for one rank."""


def deal(minibatches: list[list[Dealt]], ranks: Ranks, pairs_per_token: float) -> Deal:
    """Return this rank's share of rank 0's batches.

    Ranks make their passes in lockstep, as they bring the weights together for each: a pass takes as long as
    its most costly batch. So one pass is made of batches that cost about the same.
    """
    if ranks.size == 1:
        return Deal(minibatches)
    found: Deal = ranks.scatter(_deals(minibatches, ranks.size, pairs_per_token) if ranks.leads else None)
    return found


def _deals(minibatches: Sequence[Sequence[Dealt]], size: int, pairs_per_token: float) -> list[Deal]:
    def cost_of(one: Dealt) -> float:
        return cost(one.batch, pairs_per_token)

    passes = [_passes(sorted(one, key=cost_of, reverse=True), size) for one in minibatches]
    costs = [[cost_of(one) for one in made] for part in passes for made in part]
    numbers = {
        "ranks": float(size),
        "empty_passes": float(sum(size - len(made) for made in costs)),
        "balance": sum(map(sum, costs)) / max(1.0, size * sum(map(max, costs))),
    }
    shares = (
        [[made[rank] if rank < len(made) else NOTHING for made in part] for part in passes]
        for rank in range(size)
    )
    return [Deal(share, numbers) for share in shares]


def _passes(ordered: Sequence[Dealt], size: int) -> list[Sequence[Dealt]]:
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def cost(batch: Batch, pairs_per_token: float) -> float:
    """What a batch costs, in tokens: those it has, and its pairs of tokens that attend to each other."""
    return len(batch) + float(batch.positions.sum(dtype=np.float64) + len(batch)) / pairs_per_token
