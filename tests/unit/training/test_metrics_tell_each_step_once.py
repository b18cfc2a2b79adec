"""Numbers of a run: each step once in the file, lines where nobody watches, and what is missing is named."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

from polar.client import Client
from polar.errors import InvalidInput, NotInstalled, PolarError, Unavailable
from polar.models.task import Run, RunKind
from polar.models.views import MOST_NUMBERS, RunStep
from polar.training import trackers
from polar.training.metrics import FILE, RunOnServer, board
from polar.training.run import train
from polar.training.settings import MetricsSettings, SftSettings
from tests.fakes.scripted_rollouts import group

ANSWERS = ([[10, 11]], [[20]])


class Reporting:
    """Takes what a client reports of runs, unless the server is away."""

    server = "http://polar.test"

    def __init__(self) -> None:
        self.began: list[tuple[Run, int]] = []
        self.steps: list[RunStep] = []
        self.refused: PolarError | None = None

    def begin_run(self, run: Run, step: int) -> None:
        self.began.append((run, step))

    def report_steps(self, run: str, steps: Iterable[RunStep]) -> None:
        if self.refused is not None:
            raise self.refused
        self.steps += steps


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


def test_a_server_is_told_each_step_once_and_what_it_missed_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporting, said = Reporting(), io.StringIO()
    run = Run(name="grpo", kind=RunKind.TRAINING)
    server = RunOnServer(cast(Client, reporting), run, "secret")
    with board(MetricsSettings(), tmp_path, 3, Console(file=said), server) as write:
        write(4, {"loss": 1.0}, [group(ANSWERS, (1.0, 0.0), task_id="learned")])
        reporting.refused = Unavailable("no server")
        write(5, {"loss": 2.0, "kl": float("inf")})
        assert "step 5 is not on the dashboard" in caplog.text
        reporting.refused = None
        write(6, {"loss": 3.0})
    assert reporting.began == [(run, 3)]
    assert [(step.step, step.numbers, step.tasks) for step in reporting.steps] == [
        (4, {"loss": 1.0}, ("learned",)),
        (5, {"loss": 2.0}, ()),
        (6, {"loss": 3.0}, ()),
    ]
    # Output that is no terminal stays where it is written: it holds no token.
    assert "dashboard: http://polar.test/runs/grpo\n" in said.getvalue()
    assert server.link(is_shown=True) == "http://polar.test/runs/grpo#token=secret"


def test_a_step_that_a_server_refuses_keeps_no_later_one_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reporting = Reporting()
    server = RunOnServer(cast(Client, reporting), Run(name="grpo", kind=RunKind.TRAINING))
    with board(MetricsSettings(), tmp_path, 0, Console(file=io.StringIO()), server) as write:
        reporting.refused = InvalidInput("not like this")
        write(1, {"loss": 1.0})
        reporting.refused = None
        write(2, {"loss": 2.0})
    assert "step 1 is not on the dashboard: not like this" in caplog.text
    assert [step.step for step in reporting.steps] == [2]


def test_more_numbers_than_a_server_takes_end_no_run(tmp_path: Path) -> None:
    reporting = Reporting()
    server = RunOnServer(cast(Client, reporting), Run(name="grpo", kind=RunKind.TRAINING))
    families = {f"reward/{family}": 1.0 for family in range(2 * MOST_NUMBERS)} | {
        "reward/" + "long" * 99: 1.0
    }
    with board(MetricsSettings(), tmp_path, 0, Console(file=io.StringIO()), server) as write:
        write(1, {**families, "loss": 2.0})
    (step,) = reporting.steps
    assert len(step.numbers) == MOST_NUMBERS
    assert step.numbers["loss"] == 2.0
    assert len(json.loads((tmp_path / FILE).read_text())) == 2 * MOST_NUMBERS + 3


class Unreachable:
    """A tracker's run that cannot be told anything."""

    def log(self, numbers: object, step: int) -> None:
        raise ConnectionError("no route to host")

    def finish(self) -> None:
        raise ConnectionError("no route to host")


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_tracker_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_interrupted: bool
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: Unreachable()))
    with (
        pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext(),
        board(MetricsSettings(wandb="polar"), tmp_path, 0, Console(file=io.StringIO())) as write,
    ):
        write(1, {"loss": 1.0})
        write(2, {"loss": 2.0})
        if is_interrupted:
            raise KeyboardInterrupt
    assert "step 2 is not in wandb: ConnectionError: no route to host" in caplog.text
    assert "the end of the run is not in wandb: ConnectionError: no route to host" in caplog.text
    assert len((tmp_path / FILE).read_text().splitlines()) == 2


def test_rollouts_are_spread_from_the_best_to_the_worst() -> None:
    groups = [group(ANSWERS, (0.5, 1.0), task_id="a"), group(ANSWERS, (0.0, 0.2), task_id="b")]
    shown = trackers.rollouts(groups, 3)
    assert [one.reward for one in shown] == [1.0, 0.2, 0.0]
    assert all(one.session for one in shown)
    assert trackers.rollouts(groups, 0) == []
    assert len(trackers.rollouts(groups, 100)) == 4
    assert trackers.rollouts([], 3) == []


@pytest.mark.parametrize(
    "settings",
    [
        MetricsSettings(tensorboard=True),
        MetricsSettings(wandb="polar"),
        MetricsSettings(mlflow="polar"),
        MetricsSettings(trackio="polar"),
    ],
)
def test_a_writer_that_is_not_installed_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: MetricsSettings
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda _package: None)
    run = SftSettings(out=tmp_path / "run", steps=1, data=(tmp_path / "none",), metrics=settings)
    with pytest.raises(NotInstalled, match="pip install"):
        train(run, Console(file=io.StringIO()))
    assert not run.out.exists()
    trackers.require(MetricsSettings())
