"""Examples come with the package: one copy of each in the project, and never over a user's own changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.app.quickstart import EXAMPLES, copy_examples
from polar.cli.quickstart import quickstart
from polar.errors import InvalidInput
from polar.tasksets import files
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
    assert run.model.start is not None
    assert run.model.start.resolve() == (tmp_path / "examples" / "warm-start")
    assert (run.model.start / "adapter_model.safetensors").is_file()
    assert run.rollouts is not None
    assert len(load_tasks(*run.rollouts.tasks)) == 26
    assert load_tasks(Path("examples/quickstart"))


def test_the_plug_in_is_copied_whole_and_without_what_python_makes(tmp_path: Path) -> None:
    copied = {str(path.relative_to(tmp_path)) for path in copy_examples(tmp_path)}
    assert {"file-shell/pyproject.toml", "file-shell/polar_file_shell/source.py"} <= copied
    assert not [name for name in copied if "__pycache__" in name or "egg-info" in name]


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
    asked: list[Path] = []

    def load(path: Path) -> None:
        asked.append(path)
        raise InvalidInput("far enough")

    monkeypatch.setattr(files, "load_tasks", load)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="far enough"):
            quickstart()
        copy_examples(Path("examples"))
    assert asked == [EXAMPLES / "quickstart", Path("examples/quickstart")]
