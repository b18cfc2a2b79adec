"""`polar tasks validate` tells tasks that teach from those that mislead, without a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from polar.app.validation import (
    TaskReport,
    TrialNode,
    TrialOutcome,
    Trouble,
    attacks_on,
    trial_node,
    validate,
)
from polar.cli.main import app
from polar.config.settings import NodeSettings
from polar.tasksets.files import read_tasks

pytestmark = pytest.mark.sandbox

CHECK = '[ "$(cat answer.txt 2>/dev/null)" = 42 ]'
SOLUTION = "printf 42 > answer.txt"


@pytest.fixture
async def place() -> AsyncIterator[TrialNode]:
    async with trial_node(NodeSettings()) as made:
        yield made


def written(directory: Path, check: str, solution: Any = SOLUTION, **fields: Any) -> Path:
    task = {
        "id": "answer",
        "instruction": "Write 42 to answer.txt.",
        "harness": {"name": "shell", "options": {"command": "true"}},
        "evaluator": {"name": "command", "options": {"command": check, "reward": "exit_code"}},
        **fields,
    }
    if solution is not None:
        task["solution"] = solution
    file = directory / "tasks.yaml"
    file.write_text(yaml.safe_dump(task))
    return file


async def tried(file: Path, place: TrialNode, *, attacks: bool = False) -> TaskReport:
    loaded = read_tasks(file)
    [report] = await validate(loaded.all_or_nothing(), loaded.solutions, place, jobs=2, attacks=attacks)
    return report


async def test_a_sound_task_has_no_trouble_and_withstands_every_attack(
    tmp_path: Path, place: TrialNode
) -> None:
    report = await tried(written(tmp_path, CHECK), place, attacks=True)
    assert report.troubles == {}
    assert [one.reward for one in report.solution] == [1.0, 1.0]
    assert {one.reward for one in report.attacks} == {0.0}
    assert len(report.attacks) == len(attacks_on(read_tasks(tmp_path / "tasks.yaml").tasks[0])) > 10


@pytest.mark.parametrize(
    ("check", "solution", "trouble"),
    [
        (CHECK, "true", Trouble.UNSOLVABLE),
        ("true", SOLUTION, Trouble.FREE),
    ],
)
async def test_what_is_wrong_is_named(
    tmp_path: Path, place: TrialNode, check: str, solution: str, trouble: Trouble
) -> None:
    assert trouble in (await tried(written(tmp_path, check, solution), place)).troubles


def test_a_check_in_the_workspace_can_be_cheated_and_it_is_said_how(tmp_path: Path) -> None:
    file = written(tmp_path, "sh test_answer.sh", files={"test_answer.sh": {"text": CHECK}})
    done = CliRunner().invoke(app, ["tasks", "validate", str(file), "--jobs", "2"])
    assert done.exit_code == 1, done.output
    assert "can be cheated" in done.stdout
    assert "tests-emptied: Tests without content." in done.stdout.splitlines()


def test_an_attack_that_makes_grading_fail_is_named_with_how_it_fails(tmp_path: Path) -> None:
    """Such a session is left out of its group, which pays an agent that cannot do its task."""
    penalty = f"if [ ! -s spec.md ]; then reward -1; elif {CHECK}; then reward 1; else reward 0; fi"
    evaluator = {"name": "command", "options": {"command": penalty, "reward": "stated"}}
    file = written(tmp_path, "", evaluator=evaluator, files={"spec.md": {"text": "42"}})
    done = CliRunner().invoke(app, ["tasks", "validate", str(file), "--jobs", "2"])
    assert done.exit_code == 1, done.output
    assert "can be escaped: " in done.stdout
    assert "tests-deleted, tests-emptied, " in done.stdout
    assert "tests-locked: the evaluator gave -1, which is below its lowest_reward of 0" in done.stdout
    assert "tests-emptied: Tests without content." in done.stdout.splitlines()


def test_a_task_that_fails_whatever_is_done_is_not_called_one_that_attacks_escape() -> None:
    failed = TrialOutcome("doing nothing", error="no disk"), TrialOutcome("doing nothing", error="no disk")
    report = TaskReport("answer", failed, attacks=(TrialOutcome("tests-emptied", error="no disk"),))
    assert report.troubles == {Trouble.UNGRADABLE: "no disk"}


def test_nothing_is_attacked_where_attacks_would_reach_this_machine(tmp_path: Path) -> None:
    file = written(tmp_path, CHECK, runtime="process")
    assert attacks_on(read_tasks(file).tasks[0]) == ()
    config = tmp_path / "polar.yaml"
    config.write_text("node: {runtimes: [process]}\n")
    done = CliRunner().invoke(app, ["tasks", "validate", str(file), "--config", str(config)])
    assert done.exit_code == 0, done.output
    assert "1 task not attacked: the runtime process isolates nothing" in done.stdout


async def test_the_same_work_scored_differently_is_flaky(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    # Every other look at the same directory finds something else in it.
    look = f"{CHECK} && if rmdir {seen}/once 2>/dev/null; then false; else mkdir {seen}/once; fi"
    async with trial_node(NodeSettings(runtimes=("process",))) as place:
        report = await tried(written(tmp_path, look, runtime="process"), place)
    assert "the solution was worth" in report.troubles[Trouble.FLAKY]


async def test_a_task_whose_preparation_fails_cannot_be_graded(tmp_path: Path, place: TrialNode) -> None:
    report = await tried(written(tmp_path, CHECK, prepare=[{"exec": "echo broken >&2; exit 3"}]), place)
    assert "broken" in report.troubles[Trouble.UNGRADABLE]


async def test_a_solution_brings_files_that_the_workspace_does_not_have(
    tmp_path: Path, place: TrialNode
) -> None:
    solution = {"script": 'cp "$POLAR_SOLUTION/answer.txt" .', "files": {"answer.txt": {"text": "42"}}}
    assert (await tried(written(tmp_path, CHECK, solution), place)).troubles == {}


def test_a_solution_is_no_part_of_the_task(tmp_path: Path) -> None:
    loaded = read_tasks(written(tmp_path, CHECK))
    assert loaded.solutions["answer"].script == SOLUTION
    assert SOLUTION not in loaded.tasks[0].model_dump_json()


@pytest.mark.parametrize("solution", ["", {"files": {}}, {"script": "x", "other": 1}, 7])
def test_a_solution_that_is_wrong_is_named_by_its_field(tmp_path: Path, solution: Any) -> None:
    [problem] = read_tasks(written(tmp_path, CHECK, solution)).problems
    assert "task 'answer': solution" in problem


def test_the_command_prints_a_table_and_exits_by_what_it_found(tmp_path: Path) -> None:
    run: Callable[..., Any] = CliRunner().invoke
    sound = run(app, ["tasks", "validate", str(written(tmp_path, CHECK)), "--no-attacks"])
    assert sound.exit_code == 0, sound.output
    assert "1 task, 0 with problems" in sound.stdout
    free = run(app, ["tasks", "validate", str(written(tmp_path, "true", None)), "--no-attacks", "--json"])
    assert free.exit_code == 1
    assert json.loads(free.stdout)[0]["troubles"] == {"rewards no work": "doing nothing is worth 1"}


def test_tasks_that_name_no_harness_are_tried_too(tmp_path: Path) -> None:
    file = written(tmp_path, CHECK)
    document = yaml.safe_load(file.read_text())
    del document["harness"]
    file.write_text(yaml.safe_dump(document))
    assert CliRunner().invoke(app, ["tasks", "validate", str(file), "--no-attacks"]).exit_code == 0
