"""The tutorial and the recipe for eight GPUs: every file in them loads, every command in them parses.

Nothing runs here: files are read with the loaders that the commands use, and command lines by the commands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from polar.cli.main import app
from polar.config.plugins import check_components
from polar.config.settings import load_settings
from polar.tasksets.files import load_tasks
from polar.training.settings import GrpoSettings, load_run

ROOT = Path(__file__).parents[2]
PAGES = ("docs/tutorial.md", "docs/guides/eight-gpus.md")
BLOCK = re.compile(r'^```(bash|yaml)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str, str]]:
    return BLOCK.findall((ROOT / page).read_text())


@pytest.fixture(params=PAGES)
def desk(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files of a page, beside the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for language, title, text in blocks(request.param):
        if language == "yaml":
            assert title, "each file has a name"
            (tmp_path / title).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLAR_CONFIG", raising=False)
    return tmp_path


def test_every_file_loads(desk: Path) -> None:
    run = load_run(Path("run.yaml"), GrpoSettings)
    assert run.rollouts is not None
    held_out = run.rollouts.held_out.tasks if run.rollouts.held_out else ()
    tasks = load_tasks(*run.rollouts.tasks, *held_out)
    for task in tasks:
        check_components(task)
        assert (task.budgets.max_context_tokens or 0) + (task.sampling.max_tokens or 0) <= run.batch.tokens
    assert len(tasks) >= run.groups
    settings = load_settings(run.rollouts.config or Path("polar.yaml"))
    if run.rollouts.server is None:
        assert run.model.start is not None
        assert (run.model.start / "adapter_config.json").is_file()
    else:
        assert run.rollouts.server.endswith(f":{settings.server.port}")
        assert settings.engine.model == run.model.name


def commands(page: str) -> Iterator[list[str]]:
    """The arguments of each `polar` in a page's shell blocks."""
    for language, _, text in blocks(page):
        for line in text.replace("\\\n", " ").splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            if "polar" in words:
                yield words[words.index("polar") + 1 :]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_has_its_options(page: str) -> None:
    group = typer.main.get_command(app)
    assert len(list(commands(page))) >= 5
    for words in commands(page):
        command: Any = group.get_command(None, words[0])  # type: ignore[attr-defined]
        parts = [command, getattr(command, "commands", {}).get("".join(words[1:2]))]
        known = [parameter for part in parts if part for parameter in part.params]
        options = {name for parameter in known for name in (*parameter.opts, *parameter.secondary_opts)}
        given = {word for word in words if word.startswith("-")}
        assert given <= options, f"polar {' '.join(words)}"


def test_the_last_step_of_the_tutorial_is_the_one_it_evaluates() -> None:
    files = {title: yaml.safe_load(text) for language, title, text in blocks(PAGES[0]) if language == "yaml"}
    last = f"{files['run.yaml']['out']}/checkpoints/step-{files['run.yaml']['steps']:06}/weights"
    assert sum(last in words for words in commands(PAGES[0])) == 2
