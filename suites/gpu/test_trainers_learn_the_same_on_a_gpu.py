"""On a GPU: every layout gives one gradient, through FlexAttention in float32 and densely in float64."""

from __future__ import annotations

from pathlib import Path

from benchmarks.training.gradients import compare_gradients
from benchmarks.training.layouts import LAYOUTS
from polar.training.settings import ModelSettings
from tests.fakes.tiny_llama import write_tiny_llama
from tests.fakes.training_runs import groups

DEVICE = "cuda"


def test_gradients_of_all_layouts_are_one(tmp_path: Path) -> None:
    directory = write_tiny_llama(tmp_path)
    recordings = [one.recording for each in groups() for one in each.samples if one.recording is not None]
    found = compare_gradients(recordings, ModelSettings(name=str(directory), device=DEVICE), budget=1024)
    assert not found.missed
    assert max(found.exact.values()) <= 1e-6
    assert found.rounding.keys() == {layout.name for layout in LAYOUTS}
