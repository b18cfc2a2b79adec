"""AgentBench's operating system tasks: what is left out is counted by name, and only the answer counts."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from polar_public_tasks.agentbench_os import ANSWER, NOT_HERE, WORKSPACE, AgentBenchOs, left_out, records

from polar.errors import InvalidInput
from polar.tasksets.files import load_tasks
from polar.tasksets.rows import Row

EXAMPLE = Path(__file__).parents[3] / "examples" / "public-tasks" / "agentbench-os.yaml"


def rows(split: str | None = None) -> dict[str, Row]:
    made = AgentBenchOs(AgentBenchOs.Options()).rows(None, split)
    return {row.where: row for row in made if isinstance(row, Row)}


ROWS = rows()


def task(row: Row) -> dict[str, Any]:
    assert row.task is not None
    return dict(row.task)


def run(command: str, workspace: Path) -> int:
    """As in the sandbox, but where the workspace is."""
    words = ["/bin/sh", "-c", command.replace(WORKSPACE, str(workspace))]
    return subprocess.run(words, cwd=workspace, capture_output=True, check=False, timeout=30).returncode


def prepared(row: Row, workspace: Path) -> Path:
    workspace.mkdir()
    for step in task(row)["prepare"]:
        assert run(step["exec"], workspace) == 0
    return workspace


def grade(row: Row, workspace: Path) -> int:
    return run(task(row)["evaluator"]["options"]["command"], workspace)


def test_every_task_is_there_or_left_out_for_a_reason() -> None:
    reasons = {
        split: Counter(left_out(split, record) for record in records(split)) for split in ("dev", "test")
    }
    assert {split: count.total() for split, count in reasons.items()} == {"dev": 26, "test": 119}
    assert {split: count[None] for split, count in reasons.items()} == {"dev": 12, "test": 83}
    assert len(ROWS) == 95


def test_whatever_is_named_as_not_working_is_a_task() -> None:
    named = {name for names in NOT_HERE.values() for name in names.split()}
    assert named <= {f"{split}-{record['id']}" for split in ("dev", "test") for record in records(split)}


def test_the_example_is_whole_tasks() -> None:
    assert len(load_tasks(EXAMPLE)) == 12


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(InvalidInput, match="must be one of dev, test"):
        rows("train")


def test_of_the_agents_work_only_the_answer_is_carried() -> None:
    for row in ROWS.values():
        assert task(row)["evaluator"]["options"]["allow"] == [ANSWER]
        assert ANSWER in task(row)["instruction"]


@pytest.mark.parametrize("name", ["dev 6", "dev 7", "test 22", "test 40", "test 42", "test 57", "test 113"])
def test_the_reference_is_right_and_another_answer_is_not(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    workspace = prepared(row, tmp_path / "solved")
    assert grade(row, workspace) != 0
    assert run(task(row)["solution"], workspace) == 0
    answer = (workspace / ANSWER).read_text()
    # It is found out anew where the answer alone is carried.
    other = prepared(row, tmp_path / "graded")
    (other / ANSWER).write_text(answer)
    assert grade(row, other) == 0
    (other / ANSWER).write_text(f"{answer}1")
    assert grade(row, other) != 0
    (other / ANSWER).write_text("")
    assert grade(row, other) != 0


def test_an_answer_that_is_no_file_is_wrong_at_once(tmp_path: Path) -> None:
    row = ROWS["dev 6"]
    workspace = prepared(row, tmp_path / "graded")
    os.mkfifo(workspace / ANSWER)
    assert grade(row, workspace) != 0
