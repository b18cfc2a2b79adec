"""What training on a set of sessions costs, laid out in each of the ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.training.layouts import OBJECTIVE, Layout, laid_out
from polar.recordings.recording import Recording
from polar.training.learner import Learner
from polar.training.metrics import GpuUsage
from polar.training.objective import Measured, policy_loss
from polar.training.policy import TrainerPolicy, load_policy
from polar.training.settings import DivergenceLimits, ModelSettings, OptimizerSettings, Pack
from polar.trajectory.packing.batch import Batch

LEARNING_RATE = 1e-6
UNLIMITED = DivergenceLimits(behaviour_kl=None)
"""Scripted sessions carry made-up logprobs."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One layout's step: the gradient of all sessions, and one update with it."""

    name: str
    goal: float | None
    traces: int
    passes: int
    """Forward and backward passes of at most the token budget."""
    tokens: int
    """Computed, without padding."""
    trained_tokens: int
    """Different tokens that carry loss: the same for every layout."""
    pack_seconds: float
    """Building traces and batches, on the host."""
    seconds: float
    """Of a step, passes and update."""
    steps: int
    """How many were made to find that out."""
    loss: float
    grad_norm: float
    gpu_busy: float | None
    peak_gib: float | None

    @property
    def trained_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def measure(
    layout: Layout, recordings: Sequence[Recording], model: ModelSettings, budget: int, least_seconds: float
) -> Measurement:
    """Whole steps, as many as take `least_seconds`, after a pass that compiles what is compiled."""
    began = time.perf_counter()
    made = laid_out(recordings, layout, budget)
    packed = time.perf_counter() - began
    batches = made.packing.batches
    policy = load_policy(model, most_tokens=budget, is_packed=layout.pack is not Pack.ALONE)
    _warm_up(policy, batches)
    learner = Learner(
        policy, partial(policy_loss, settings=OBJECTIVE), OptimizerSettings(lr=LEARNING_RATE), UNLIMITED, 1
    )
    numbers: list[dict[str, float]] = []
    is_gpu = policy.device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    with GpuUsage(policy.device) as busy:
        began = time.perf_counter()
        while not numbers or time.perf_counter() - began < least_seconds:
            numbers.append(learner.learn(made))
        seconds = (time.perf_counter() - began) / len(numbers)
        share = busy.share()
    return Measurement(
        name=layout.name,
        goal=layout.goal,
        traces=made.packing.stats.rows,
        passes=len(batches),
        tokens=made.packing.stats.packed_tokens,
        trained_tokens=sum(len(batch.terms) for batch in batches),
        pack_seconds=packed,
        seconds=seconds,
        steps=len(numbers),
        loss=numbers[0]["loss"],
        grad_norm=numbers[0]["grad_norm"],
        gpu_busy=share,
        peak_gib=torch.cuda.max_memory_allocated() / 2**30 if is_gpu else None,
    )


def _warm_up(policy: TrainerPolicy, batches: Sequence[Batch]) -> None:
    """One pass over the largest and the smallest batch: every size there is, and what they allocate."""
    for batch in {id(one): one for one in (max(batches, key=len), min(batches, key=len))}.values():
        logprobs, entropy = policy.measure(batch)
        policy_loss(batch, Measured(logprobs, entropy), OBJECTIVE).value.backward()
    policy.model.zero_grad(set_to_none=True)
