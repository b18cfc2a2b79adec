"""Runs of several processes beside runs of one: what must be the same in both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from polar.training.checkpoint import Checkpoint
from polar.training.run import train
from polar.training.settings import GrpoSettings
from tests.fakes.training_runs import quiet, settings, tensors

SUMS = ("loss", "grad_norm", "entropy", "kl", "behaviour_kl", "clip_fraction", "tis_fraction", "lr")
OF_SOME = ("importance/", "mismatch/")
"""What the names of means over some of the terms begin with."""


def run_of(tiny_model: Path, directory: Path, **changes: Any) -> GrpoSettings:
    """A run in which clipping, a reference and several batches of unequal cost take part."""
    document: dict[str, Any] = {
        "steps": 3,
        "groups": 3,
        "batch": {"tokens": 20},
        "objective": {"kl": 0.1, "entropy": 0.01},
        "optimizer": {"lr": 1e-3, "updates": 2, "max_grad_norm": 1.0},
        **changes,
    }
    return settings(tiny_model, directory, **document)


def trained(run: GrpoSettings, processes: int, steps: int | None = None) -> Checkpoint:
    going = run.model_copy(update={"steps": steps or run.steps})
    return train(going, quiet(), processes)


def gradients(kept: Checkpoint) -> dict[str, torch.Tensor]:
    """Adam's mean of gradients, put together from what each rank has kept of it."""
    parts = [part["optimizer"] for part in kept.parts()]
    return {name: torch.cat([part[name]["exp_avg"] for part in parts]) for name in parts[0]}


def numbers(run: GrpoSettings) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """How far two sets of tensors are from each other, of the largest number in them."""
    assert one.keys() == other.keys()
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    assert largest > 1e-4
    return max(float((one[name] - other[name]).abs().max()) for name in one) / largest


def assert_same(
    run: GrpoSettings, kept: Checkpoint, other: GrpoSettings, theirs: Checkpoint, by: float
) -> None:
    assert apart(tensors(kept.weights), tensors(theirs.weights)) <= by
    assert apart(gradients(kept), gradients(theirs)) <= by
    for ours, line in zip(numbers(run), numbers(other), strict=True):
        assert {one for one in ours if one.startswith(OF_SOME)} == {
            one for one in line if one.startswith(OF_SOME)
        }
        for name in (*SUMS, *(one for one in ours if one.startswith(OF_SOME))):
            # They are told in single precision, whatever is computed in.
            assert abs(ours[name] - line[name]) <= 1e-4 * max(1.0, abs(ours[name])), (name, ours, line)
