"""A mistake in an evaluation's command is one line, told before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from polar.cli.main import app
from polar.evals.documents import report_files, write
from tests.fakes.reports import cell, report


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a taskset, an empty one, and two evaluations of other tasks."""
    monkeypatch.chdir(tmp_path)
    task = {
        "id": "a",
        "instruction": "do it",
        "runtime": "process",
        "harness": {"name": "shell", "options": {"command": "true"}},
        "evaluator": {"name": "command", "options": {"command": "true"}},
    }
    Path("tasks.yaml").write_text(yaml.safe_dump([task]))
    Path("empty.jsonl").write_text("")
    Path("empty").mkdir()
    write(report_files(report(cell({"x": [1.0]}, taskset="one"))), Path("one"))
    write(report_files(report(cell({"y": [1.0]}, taskset="two"))), Path("two"))
    return tmp_path


EVAL = ("eval", "--out", "out", "--taskset")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*EVAL, "absent.yaml"), "absent.yaml"),
        ((*EVAL, "empty.jsonl"), "empty.jsonl"),
        ((*EVAL, "empty"), "empty: "),
        ((*EVAL, "-"), "standard input cannot be read again"),
        ((*EVAL, "tasks.yaml", "--harness", "emacs"), "unknown name 'emacs' (known: "),
        ((*EVAL, "tasks.yaml", "--harness", "shell:{command: []}"), "harness.options.command"),
        ((*EVAL, "tasks.yaml", "--harness", "pi", "--harness", "pi"), "two are called 'pi'"),
        ((*EVAL, "tasks.yaml", "--fail-under", "speed=1"), "unknown metric 'speed'"),
        ((*EVAL, "tasks.yaml", "--fail-under", "pass@2=1"), "unknown metric 'pass@2'"),
        ((*EVAL, "tasks.yaml", "--k", "2"), "--k 2: requires at least 2 --samples"),
        (
            (*EVAL, "tasks.yaml", "--server", "http://127.0.0.1:9", "--model", "m"),
            "--server has its own engine and node",
        ),
        ((*EVAL, "tasks.yaml", "--baseline", "none"), "none: no such directory"),
        ((*EVAL, "tasks.yaml", "--baseline", "one"), "--baseline one: no task in common (it evaluated one)"),
        ((*EVAL, "tasks.yaml", "--runtime", "moon"), "moon"),
        (("eval", "--out", "tasks.yaml", "--taskset", "tasks.yaml"), "tasks.yaml: is not a directory"),
        (("compare", "one", "two"), "one and two have no task in common"),
        (("compare", "one", "tasks.yaml"), "tasks.yaml: not a report"),
        (
            ("compare", "one", "one", "--after-harness", "codex"),
            "run 0badcafe has no harness 'codex' (it has pi)",
        ),
    ],
)
def test_a_mistake_is_one_line(here: Path, arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output + repr(result.exception)
    assert result.stderr.startswith("error: ")
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (here / "out" / "models").exists()


def test_two_runs_are_compared_in_the_terminal(here: Path) -> None:
    write(report_files(report(cell({"x": [0.0]}, taskset="one"))), here / "later")
    result = CliRunner().invoke(app, ["compare", "one", "later"])
    assert result.exit_code == 0, result.output
    assert "-1.000" in result.stdout
    assert "lost" in result.stdout
