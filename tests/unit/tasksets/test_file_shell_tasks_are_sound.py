"""Generated file-and-shell tasks: enough, always the same, solvable, and nothing held out is trained on."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from polar_file_shell.draw import NOUNS, PEOPLE, Split
from polar_file_shell.families import FAMILIES, HELD_OUT_ALONE
from polar_file_shell.source import FileShell

from polar.errors import InvalidInput
from polar.tasksets.files import load_tasks, read_tasks
from polar.tasksets.rows import Row

EXAMPLES = Path(__file__).parents[3] / "examples" / "grpo-pi"
WORDS = frozenset(NOUNS) | frozenset(PEOPLE)


def rows(split: Split, **options: int) -> list[Row]:
    made = list(FileShell(FileShell.Options(**options)).rows(None, split))
    assert all(isinstance(row, Row) for row in made)
    return [row for row in made if isinstance(row, Row)]


def task(row: Row) -> dict[str, Any]:
    assert row.task is not None
    return dict(row.task)


TRAIN, HELD_OUT = rows(Split.TRAIN), rows(Split.HELD_OUT)


def test_there_are_enough_and_no_two_are_alike() -> None:
    assert len(TRAIN) >= 240
    assert len(HELD_OUT) >= 80
    for what in ("id", "instruction"):
        assert len({task(row)[what] for row in TRAIN + HELD_OUT}) == len(TRAIN) + len(HELD_OUT)


def test_the_same_seed_makes_the_same_tasks_and_another_makes_others() -> None:
    assert rows(Split.TRAIN) == TRAIN
    same = {task(row)["instruction"] for row in TRAIN} & {
        task(row)["instruction"] for row in rows(Split.TRAIN, seed=1)
    }
    assert not same


def test_no_word_of_a_held_out_task_is_ever_trained_on() -> None:
    def words(made: list[Row]) -> frozenset[str]:
        texts = [str((task(row)["instruction"], task(row)["files"])) for row in made]
        return WORDS & set(re.findall(r"[A-Za-z]+", " ".join(texts).replace("\\n", " ")))

    assert len(words(TRAIN)) > 90
    assert len(words(HELD_OUT)) > 30
    # "table" and its like would also be English; here they stand for themselves alone.
    assert not words(TRAIN) & words(HELD_OUT)


def test_some_compositions_are_held_out_alone() -> None:
    families = {row.columns["family"] for row in TRAIN}
    assert families == set(FAMILIES)
    assert {row.columns["family"] for row in HELD_OUT} - families == set(HELD_OUT_ALONE)


def test_what_solves_a_task_is_no_part_of_it() -> None:
    loaded = read_tasks(EXAMPLES / "train.yaml")
    script = loaded.solutions[loaded.tasks[0].id].script
    assert script not in loaded.tasks[0].model_dump_json()


def test_the_examples_are_whole_tasks() -> None:
    assert len(load_tasks(EXAMPLES / "train.yaml")) == len(TRAIN)
    assert len(load_tasks(EXAMPLES / "held-out.yaml")) == len(HELD_OUT)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one of train, held_out"):
        list(FileShell(FileShell.Options()).rows(None, "test"))


def lay_out(row: Row, workspace: Path) -> Path:
    workspace.mkdir()
    for path, content in task(row)["files"].items():
        (workspace / path).write_text(content["text"])
    return workspace


def carry_out(tool: str, arguments: dict[str, Any], workspace: Path) -> None:
    """A call as Pi's tools carry it out."""
    match tool:
        case "bash":
            subprocess.run(["bash", "-c", arguments["command"]], cwd=workspace, check=True)
        case "write":
            (workspace / arguments["path"]).write_text(arguments["content"])
        case "read":
            assert (workspace / arguments["path"]).is_file()
        case "edit":
            file = workspace / arguments["path"]
            for edit in arguments["edits"]:
                assert file.read_text().count(edit["oldText"]) == 1
                file.write_text(file.read_text().replace(edit["oldText"], edit["newText"]))


def passes(row: Row, workspace: Path) -> bool:
    check = task(row)["evaluator"]["options"]["command"]
    done = subprocess.run(["/bin/sh", "-c", check], cwd=workspace, stderr=subprocess.DEVNULL, check=False)
    return done.returncode == 0


@pytest.mark.parametrize("row", HELD_OUT[: len(FAMILIES) + len(HELD_OUT_ALONE)], ids=lambda row: row.where)
def test_every_solution_passes_and_doing_nothing_does_not(row: Row, tmp_path: Path) -> None:
    assert not passes(row, lay_out(row, tmp_path / "idle"))
    for number, solution in enumerate(row.columns["solutions"]):
        workspace = lay_out(row, tmp_path / str(number))
        for call in solution:
            carry_out(call["tool"], call["arguments"], workspace)
        assert passes(row, workspace)
    by_script = lay_out(row, tmp_path / "script")
    subprocess.run(["/bin/sh", "-c", task(row)["solution"]], cwd=by_script, check=True)
    assert passes(row, by_script)


def test_the_tasks_that_need_no_generator_are_its_first_of_each_family() -> None:
    written = (EXAMPLES / "tiny-tasks.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == [task(row) for row in rows(Split.TRAIN, of_each=1)]
