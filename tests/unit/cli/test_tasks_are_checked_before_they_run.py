"""`polar tasks check` and `polar generate` say what is wrong with tasks before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar.cli.main import app

TASK = {"id": "a", "instruction": "do it", "harness": "shell", "evaluator": "session_completed"}
SHELL = {"name": "shell", "options": {"command": "true"}}


def polar(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def rows(path: Path, *tasks: Any) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def test_valid_tasks_are_counted(tmp_path: Path) -> None:
    path = rows(
        tmp_path / "t.jsonl", {**TASK, "harness": SHELL}, {**TASK, "id": "b", "harness": SHELL, "samples": 3}
    )
    result = polar("tasks", "check", path)
    assert (result.exit_code, result.stdout) == (0, "2 tasks with 4 sessions: all valid\n")


def test_every_problem_is_named_by_line_and_field(tmp_path: Path) -> None:
    path = rows(
        tmp_path / "t.jsonl", {**TASK, "harness": SHELL}, TASK, {**TASK, "id": "c", "harness": "absent"}
    )
    result = polar("tasks", "check", path)
    assert result.exit_code == 1
    assert f"{path}:2: task 'a': harness.options.command: is required" in result.stderr
    assert "harness 'absent' is not installed here, but may be on the server" in result.stderr


def test_a_part_of_a_sum_that_only_the_server_may_know_is_no_problem(tmp_path: Path) -> None:
    evaluator = {"name": "weighted", "options": {"evaluators": [{"name": "absent"}]}}
    path = rows(tmp_path / "t.jsonl", {**TASK, "harness": SHELL, "evaluator": evaluator})
    result = polar("tasks", "check", path)
    assert result.exit_code == 0, result.output
    assert "evaluator 'absent' is not installed here, but may be on the server" in result.stderr


def test_json_tells_all_of_it(tmp_path: Path) -> None:
    path = rows(tmp_path / "t.jsonl", {**TASK, "harness": SHELL}, {"id": "b"})
    result = polar("tasks", "check", path, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["tasks"], found["sessions"]) == (1, 1, 1)
    assert len(found["problems"]) == 3


def test_a_harness_may_be_supplied(tmp_path: Path) -> None:
    path = rows(tmp_path / "t.jsonl", {"id": "a", "instruction": "x", "evaluator": "session_completed"})
    assert polar("tasks", "check", path).exit_code == 1
    assert polar("tasks", "check", path, "--harness", "pi").exit_code == 0


def test_a_misspelt_sub_command_is_refused(tmp_path: Path) -> None:
    result = polar("tasks", "chekc", tmp_path)
    assert result.exit_code == 2
    assert "No such command 'chekc'" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--accept", "reward >"), "--accept: unexpected 'end of template'"),
        (("--accept", "rewad > 1"), "--accept: unknown name 'rewad'"),
        (("--accept", "exit(1)"), "--accept: unknown name 'exit'"),
        (("--server", "http://127.0.0.1:1", "--model", "m"), "--server has its own engine"),
    ],
)
def test_a_wrong_option_of_generate_is_told_before_anything_starts(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    path = rows(tmp_path / "t.jsonl", {**TASK, "harness": SHELL})
    result = polar("generate", "-t", path, "--out", tmp_path / "out", *options)
    assert result.exit_code == 1
    assert said in result.stderr
    assert not (tmp_path / "out").exists()


def test_generate_without_a_sound_task_does_not_start(tmp_path: Path) -> None:
    result = polar("generate", "-t", rows(tmp_path / "t.jsonl", {"id": "a"}), "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "t.jsonl:1: task 'a': instruction: is required" in result.stderr
    assert "no valid tasks" in result.stderr
    assert not (tmp_path / "out").exists()
