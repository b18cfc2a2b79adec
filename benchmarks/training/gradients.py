"""Whether every layout of the same sessions has the same gradient, and how well single precision holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.training.layouts import LAYOUTS, OBJECTIVE, laid_out
from polar.recordings.recording import Recording
from polar.training.objective import Measured, policy_loss
from polar.training.policy import load_policy
from polar.training.settings import ModelSettings

EQUAL = 1e-5
"""Of the largest gradient, in float64: what is left is the float32 of the terms' weights."""
CLOSE = 1e-4
"""The same in float32, from the gradient in float64."""

Gradient = list[Any]
"""One tensor a trained parameter."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Distances of gradients, relative to the largest entry of the first layout's in float64."""

    sessions: int
    trained_tokens: int
    exact: dict[str, float]
    """Layout → how far its gradient is from the first layout's, both in float64 with a dense mask."""
    rounding: dict[str, float]
    """Layout → how far its gradient in float32, computed as in training, is from that."""
    half: dict[str, float]
    """The same in bfloat16, where a GPU trains in it."""

    @property
    def missed(self) -> list[str]:
        found = [f"{name}: another gradient" for name, far in self.exact.items() if far > EQUAL]
        return found + [f"{name}: gradient in float32" for name, far in self.rounding.items() if far > CLOSE]

    def __str__(self) -> str:
        single, half = (
            ", ".join(f"{name} {far:.1e}" for name, far in found.items())
            for found in (self.rounding, self.half)
        )
        return (
            f"gradients of {self.sessions} sessions agree to {max(self.exact.values()):.1e} of the largest "
            f"in float64; from there, in float32: {single}" + (f"; in bfloat16: {half}" if half else "")
        )


def compare_gradients(recordings: Sequence[Recording], model: ModelSettings, budget: int) -> Agreement:
    """Of all layouts, in every precision; `budget` is that of training."""
    single = _gradients(recordings, model, "float32", budget)
    is_on_gpu = model.device != "cpu" and torch.cuda.is_available()
    half = _gradients(recordings, model, "bfloat16", budget) if is_on_gpu else {}
    merged = laid_out(recordings, LAYOUTS[1], budget).packing
    # Dense masks: the least budget at which all sessions share a pass, and activations computed twice.
    least = min(budget, merged.stats.row_tokens)
    frugal = model.model_copy(update={"gradient_checkpointing": True, "compile": False})
    double = _gradients(recordings, frugal, "float64", least)
    truth = double[LAYOUTS[0].name]
    largest = max(float(one.abs().max()) for one in truth)

    def far(gradient: Gradient) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(truth, gradient, strict=True)) / largest

    return Agreement(
        sessions=len(recordings),
        trained_tokens=sum(len(batch.terms) for batch in merged.batches),
        exact={layout.name: far(double[layout.name]) for layout in LAYOUTS[1:]},
        rounding={name: far(gradient) for name, gradient in single.items()},
        half={name: far(gradient) for name, gradient in half.items()},
    )


def _gradients(
    recordings: Sequence[Recording], model: ModelSettings, precision: str, budget: int
) -> dict[str, Gradient]:
    policy = load_policy(model.model_copy(update={"precision": precision}), most_tokens=budget)
    found: dict[str, Gradient] = {}
    for layout in LAYOUTS:
        policy.model.zero_grad(set_to_none=True)
        for batch in laid_out(recordings, layout, budget).packing.batches:
            policy_loss(batch, Measured(*policy.measure(batch)), OBJECTIVE).value.backward()
        found[layout.name] = [one.grad.clone() for one in policy.parameters if one.grad is not None]
    return found
