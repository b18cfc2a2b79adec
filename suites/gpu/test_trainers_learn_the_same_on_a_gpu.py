"""On a GPU: every layout gives one gradient, through FlexAttention in float32 and densely in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.training.gradients import compare_gradients
from benchmarks.training.layouts import LAYOUTS
from polar.training.settings import ModelSettings
from tests.fakes.tiny_hybrid import write_tiny_hybrid
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.training_runs import groups

DEVICE = "cuda"


def write_hybrid(directory: Path) -> Path:
    """In dimensions that the kernels of GPUs are made for."""
    return write_tiny_hybrid(
        directory, hidden_size=64, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32
    )


@pytest.mark.parametrize("write", [write_tiny_llama, write_hybrid])
def test_gradients_of_all_layouts_are_one(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    directory = write(tmp_path)
    recordings = [one.recording for each in groups() for one in each.samples if one.recording is not None]
    found = compare_gradients(recordings, ModelSettings(name=str(directory), device=DEVICE), budget=1024)
    assert not found.missed
    assert max(found.exact.values()) <= 1e-6
    assert found.rounding.keys() == {layout.name for layout in LAYOUTS}
    # In bfloat16, where kernels of flash-linear-attention are used, a tree rounds as separate traces do.
    assert max(found.half.values()) <= 3 * found.half[LAYOUTS[0].name]
