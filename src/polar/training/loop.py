"""The training loop, the same for GRPO and SFT: collect, learn, push, log, keep."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from polar.training import checkpoint
from polar.training.checkpoint import Checkpoint
from polar.training.learner import Diverged, Learner
from polar.training.material import Material, PolicyVersions
from polar.training.metrics import GpuUsage, RunOnServer, Write
from polar.training.policy import TrainerPolicy
from polar.training.ranks import Collective, Ranks
from polar.training.settings import RunSettings
from polar.training.sources import MaterialSource

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"


class WeightSink(Protocol):
    """Takes the policy after each update."""

    def push(self, policy: TrainerPolicy) -> int:
        """Publish these weights to all engines; return their version."""


class Nowhere:
    """For recordings and datasets, which need no engine."""

    def push(self, policy: TrainerPolicy) -> int:
        return 0


HeldOutNumbers = Callable[[int, bool], dict[str, float]]
"""Evaluates the policy on held-out tasks, given the step and whether it is the last."""


@dataclass(slots=True)
class Training:
    """A run and its progress."""

    settings: RunSettings
    source: MaterialSource
    learner: Learner
    sink: WeightSink
    held_out: HeldOutNumbers | None = None
    on_server: RunOnServer | None = None
    step: int = 0
    versions: PolicyVersions = PolicyVersions(0)

    def run(self, write: Write) -> Checkpoint:
        """Train to the last step, or until time is up; return the last checkpoint."""
        ends_at = time.monotonic() + (self.settings.seconds or math.inf)
        again = self.sink.push(self.learner.policy)
        self.versions = PolicyVersions(again, kept=self.versions.kept, again=again)
        kept = self._keep() if self.step == 0 else checkpoint.latest(self.directory)
        assert kept is not None
        if self.step == 0 and (before := self._held_out(is_last=False)):
            write(0, before)
        with GpuUsage(self.learner.policy.device) as usage:
            return self._train(write, kept, usage, ends_at)

    def _train(self, write: Write, kept: Checkpoint, usage: GpuUsage, ends_at: float) -> Checkpoint:
        is_last = self.step >= self.settings.steps
        while not is_last:
            usage.begin()
            began = time.monotonic()
            material = self.source.take(self.versions)
            taken = time.monotonic()
            try:
                numbers = self.learner.learn(material)
            except Diverged as error:
                raise Diverged(f"step {self.step + 1}: {error.message}", hint=_advice(kept)) from None
            learnt = time.monotonic()
            self.step += 1
            is_last = self.step == self.settings.steps or learnt >= ends_at
            if material.packing.batches:
                self.versions = self.versions.after_update()
            if self.versions.ahead:
                self.versions = self.versions.after_push(self.sink.push(self.learner.policy))
            numbers |= _speed(material, began, taken, learnt, time.monotonic())
            numbers["version"] = self.versions.now
            if (share := usage.share()) is not None:
                numbers["gpu_busy"] = share
            numbers |= _log_numbers(self.step, material) | self._held_out(is_last=is_last)
            write(self.step, numbers, material.groups)
            if self.step % self.settings.checkpoint.every == 0 or is_last:
                kept = self._keep()
        return kept

    @property
    def directory(self) -> Path:
        return self.settings.out / CHECKPOINTS

    def resume(self, found: Checkpoint) -> None:
        """Resume after a checkpoint, whose weights are loaded already."""
        state = found.state()
        self.step = found.step
        self.versions = PolicyVersions(0, kept=state["version"])
        self.source.restore(state["source"])
        self.learner.restore(found)

    def _held_out(self, *, is_last: bool) -> dict[str, float]:
        return self.held_out(self.step, is_last) if self.held_out else {}

    def _keep(self) -> Checkpoint:
        state: dict[str, Any] = {
            "learner": self.learner.state(),
            "source": self.source.state(),
            "version": self.versions.reached,
        }

        def save(into: Path) -> None:
            self.learner.policy.save(into / checkpoint.WEIGHTS)
            self.learner.keep(into / checkpoint.RANKS)

        return checkpoint.write(self.directory, self.step, save, state, self.settings.checkpoint.keep)


def follow(begin: Callable[[Checkpoint | None], Learner], ranks: Ranks) -> None:
    """As another rank than 0, take part in what rank 0's loop orders, until it ends."""
    order, argument = ranks.next_order()
    if order is Collective.END:
        return
    learner = begin(argument)
    while True:
        match ranks.next_order():
            case Collective.LEARN, _:
                # Rank 0 has diverged by the same numbers, and says so.
                with suppress(Diverged):
                    learner.learn(Material(()))
            case Collective.GATHER, precision:
                learner.policy.gather(precision)
            case Collective.KEEP, directory:
                learner.keep(directory)
            case _:
                return


def _log_numbers(step: int, material: Material) -> dict[str, float]:
    """Return the material's numbers and log its exclusions."""
    left_out = {name: count for name, count in material.excluded.items() if count}
    if left_out:
        named = ", ".join(f"{count} {name}" for name, count in sorted(left_out.items()))
        log.warning("step %d: left out: %s", step, named)
    if not material.packing.batches:
        log.warning("step %d: nothing to learn from; the weights stay", step)
    return material.numbers | {f"excluded/{name}": float(count) for name, count in left_out.items()}


def _speed(material: Material, began: float, taken: float, learnt: float, ended: float) -> dict[str, float]:
    stats = material.packing.stats
    return {
        "tokens": float(stats.packed_tokens),
        "trained_tokens": float(sum(len(batch.terms.targets) for batch in material.packing.batches)),
        "packing_ratio": stats.ratio,
        "collect_seconds": taken - began,
        "learn_seconds": learnt - taken,
        "push_seconds": ended - learnt,
        "busy": (learnt - taken) / max(ended - began, 1e-9),
        "tokens_per_second": stats.packed_tokens / max(learnt - taken, 1e-9),
    }


def _advice(kept: Checkpoint) -> str:
    return f"the last good checkpoint is {kept.path}; go on from it with a lower learning rate"
