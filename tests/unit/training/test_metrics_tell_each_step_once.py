"""Numbers of a run: each step once in the file, lines where nobody watches, and what is missing is named."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from polar.errors import NotInstalled
from polar.training import metrics
from polar.training.metrics import FILE, board
from polar.training.run import train
from polar.training.settings import MetricsSettings, SftSettings


def test_steps_after_the_checkpoint_are_told_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 9.0}\n{"step": 3, "lo')
    with board(MetricsSettings(), tmp_path, 1, Console(file=io.StringIO())) as write:
        write(2, {"loss": 2.0, "reward": float("nan")})
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_terminal_shows_what_there_is(tmp_path: Path, is_terminal: bool) -> None:
    said = io.StringIO()
    with board(
        MetricsSettings(), tmp_path, 0, Console(file=said, force_terminal=is_terminal, width=120)
    ) as write:
        write(1, {"reward": 0.25, "loss": 0.125})
    assert "0.25" in said.getvalue()
    assert "0.125" in said.getvalue()
    assert "entropy" not in said.getvalue()


@pytest.mark.parametrize("settings", [MetricsSettings(tensorboard=True), MetricsSettings(wandb="polar")])
def test_a_writer_that_is_not_installed_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: MetricsSettings
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda _package: None)
    run = SftSettings(out=tmp_path / "run", steps=1, data=(tmp_path / "none",), metrics=settings)
    with pytest.raises(NotInstalled, match="pip install"):
        train(run, Console(file=io.StringIO()))
    assert not run.out.exists()
    metrics.require(MetricsSettings())
