"""A checkpoint holds tensors and plain values: reading one runs no code, and goes on exactly."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polar.errors import PolarError
from polar.training import checkpoint
from polar.training.checkpoint import Checkpoint


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def write(directory: Path, state: dict[str, object]) -> Checkpoint:
    return checkpoint.write(directory, 1, lambda _: None, state, keep=1)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    made = write(tmp_path / "checkpoints", {"learner": Evil(tmp_path / "ran")})
    with pytest.raises(PolarError, match="cannot be read") as refused:
        made.state()
    assert refused.value.hint
    assert not (tmp_path / "ran").exists()


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    checkpoint.seed_all(7)
    made = write(tmp_path, {"random": checkpoint.random_state()})

    def draws() -> list[float]:
        return [random.random(), float(np.random.random()), float(np.random.normal()), float(torch.rand(()))]

    before = draws()
    checkpoint.restore_random(made.state()["random"])
    assert draws() == before


def test_a_run_goes_on_where_there_are_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process keeps the generator of the GPU that it computes on, whatever others there are."""
    gpus = [torch.Generator().manual_seed(seed) for seed in range(4)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    for name, value in {
        "_lazy_init": lambda: None,
        "_lazy_call": lambda call, **_: call(),
        "device_count": lambda: len(gpus),
        "current_device": lambda: len(gpus) - 1,
    }.items():
        monkeypatch.setattr(torch.cuda.random, name, value)
    kept = checkpoint.random_state()
    expected = float(torch.rand((), generator=gpus[3]))
    del gpus[1:]
    checkpoint.restore_random(kept)
    assert float(torch.rand((), generator=gpus[0])) == expected
