"""A builder of a package of its own that notes which process it works in, and for what."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from polar.models.trace import Trajectory
from polar.node import packing
from polar.recordings.tree import TokenTree
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.extensions import registered

ROOT = Path(__file__).parents[2]


class NotingBuilder(PrefixMerging):
    """Merges as usual."""

    class Options(PrefixMerging.Options):
        notes: Path

    options: Options

    def build(self, tree: TokenTree) -> Trajectory:
        callers = [frame.name for frame in traceback.extract_stack() if frame.filename == packing.__file__]
        with self.options.notes.open("a") as file:
            print(os.getpid(), callers[0], file=file)
        return super().build(tree)


def install_noting_builder(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register it as `noting`: here, and, as an installed package would, in every process started later."""
    metadata = directory / "noting-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: noting\nVersion: 1.0\n")
    point = f"noting = {NotingBuilder.__module__}:{NotingBuilder.__name__}"
    (metadata / "entry_points.txt").write_text(f"[polar.builders]\n{point}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(directory), str(ROOT)]))
    registered(monkeypatch, "builders", noting=NotingBuilder)
