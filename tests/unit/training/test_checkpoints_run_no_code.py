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
