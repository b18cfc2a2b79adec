"""`polar train` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from polar.cli.main import app
from tests.fakes.training_runs import settings


def written(directory: Path, document: dict[str, object]) -> str:
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_a_file_is_carried_out_and_the_checkpoint_named(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path, steps=2)
    document = run.model_dump(mode="json", exclude_defaults=True)
    done = CliRunner().invoke(app, ["train", written(tmp_path, document), "--out", str(tmp_path / "there")])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "there" / "checkpoints" / "step-000002") in done.stdout
    assert (tmp_path / "there" / "checkpoints" / "step-000002" / "weights" / "tokenizer.json").is_file()


def test_a_finished_run_says_so_at_once_and_how_to_go_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = settings(tiny_model, tmp_path, steps=2)
    path = written(tmp_path, run.model_dump(mode="json", exclude_defaults=True))
    assert CliRunner().invoke(app, ["train", path]).exit_code == 0

    def assembled(*_: object) -> None:
        raise AssertionError("nothing is to be started")

    monkeypatch.setattr("polar.training.run.assemble", assembled)
    again = CliRunner().invoke(app, ["train", path])
    assert again.exit_code == 0, again.output
    assert "step-000002" in again.stdout
    assert "finished: 2 steps are done; --steps 4 trains on" in again.stderr


def test_a_run_ends_in_its_time_and_the_same_command_goes_on(tiny_model: Path, tmp_path: Path) -> None:
    run = settings(tiny_model, tmp_path)
    path = written(tmp_path, run.model_dump(mode="json", exclude_defaults=True))
    for step in (1, 2):
        done = CliRunner().invoke(app, ["train", path, "--seconds", "0.001", "--seed", "7"])
        assert done.exit_code == 0, done.output
        assert f"step-{step:06d}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sft"], "expected one settings file"),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["RUN", "--sync"], "this run has no rollouts"),
        (["sft", "RUN"], "data: is required"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tiny_model: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    run = settings(tiny_model, tmp_path)
    path = written(tmp_path, run.model_dump(mode="json", exclude_defaults=True))
    done = CliRunner().invoke(app, ["train", *(path if one == "RUN" else one for one in arguments)])
    assert done.exit_code == 1
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
