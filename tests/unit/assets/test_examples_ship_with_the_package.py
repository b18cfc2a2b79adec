"""Examples come with the package: one copy of each in the project, and never over a user's own changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.assets.shipped import EXAMPLES, WARM_START, copy_examples
from polar.cli.quickstart import _example_tasks
from polar.errors import InvalidInput
from polar.tasksets.files import load_tasks
from polar.training.settings import GrpoSettings, load_run

ROOT = Path(__file__).parents[3]


def test_the_packaged_examples_are_those_of_the_project() -> None:
    for directory in EXAMPLES.iterdir():
        assert directory.samefile(ROOT / "examples" / directory.name)


def test_a_copy_anywhere_is_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path("examples/grpo-pi/tiny.yaml") in copy_examples(Path("examples"))
    run = load_run(Path("examples/grpo-pi/tiny.yaml"), GrpoSettings)
    assert run.model.start == WARM_START
    assert run.rollouts is not None
    assert len(load_tasks(*run.rollouts.tasks, Path("examples/quickstart"))) > 200


def test_copying_again_changes_nothing_and_never_overwrites(tmp_path: Path) -> None:
    first, *_ = copy_examples(tmp_path)
    copy_examples(tmp_path)
    first.write_text("mine")
    tasks = tmp_path / "quickstart" / "tasks.yaml"
    tasks.unlink()
    with pytest.raises(InvalidInput, match=f"{first.name}: not overwritten"):
        copy_examples(tmp_path)
    assert first.read_text() == "mine"
    assert not tasks.exists()


def test_the_quickstart_prefers_tasks_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _example_tasks() == EXAMPLES / "quickstart"
    copy_examples(Path("examples"))
    assert _example_tasks() == Path("examples/quickstart")


def test_a_directory_of_ones_own_named_warm_start_comes_first(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("out: o\nsteps: 1\nrecordings: r\nmodel: {start: warm_start}\n")
    assert load_run(tmp_path / "run.yaml", GrpoSettings).model.start == WARM_START
    (tmp_path / "warm_start").mkdir()
    assert load_run(tmp_path / "run.yaml", GrpoSettings).model.start == tmp_path / "warm_start"
