"""Curves come from metrics.jsonl, whatever state its last line is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.errors import NotFound
from polar.rollout.dashboard.runs import POINTS, curves, runs


def write(directory: Path, text: str) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text(text)


def test_runs_are_found_at_any_depth_and_half_a_line_is_none(tmp_path: Path) -> None:
    write(
        tmp_path / "a", '{"step": 1, "reward": 0.5}\n{"step": 2, "reward": 0.7, "note": "x"}\n{"step": 3, "re'
    )
    write(tmp_path / "deep" / "b", '{"step": 1, "loss": 2.0}\n')
    write(tmp_path / "empty", "")
    found = {run.name: run for run in runs(tmp_path)}
    assert found.keys() == {"a", "deep/b"}
    assert (found["a"].steps, found["a"].latest) == (2, {"reward": 0.7})
    read = curves(tmp_path, "deep/b")
    assert (read.steps, read.series) == ((1,), {"loss": (2.0,)})


def test_long_run_is_thinned_out_and_keeps_its_end(tmp_path: Path) -> None:
    write(tmp_path / "long", "".join(f'{{"step": {n}, "loss": {n}.5}}\n' for n in range(1, 5_001)))
    read = curves(tmp_path, "long")
    assert len(read.steps) <= POINTS
    assert read.steps[-1] == 5_000
    assert read.series["loss"][-1] == 5_000.5


@pytest.mark.parametrize("name", ["../a", "/etc", "", "a/../a", "missing"])
def test_only_runs_below_the_directory_can_be_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "runs" / "a", '{"step": 1}\n')
    write(tmp_path / "a", '{"step": 1}\n')
    with pytest.raises(NotFound):
        curves(tmp_path / "runs", name)
