"""Rows of SWE-bench, SWE-Gym and their like as tasks, graded by the evaluator `swebench`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polar.errors import InvalidInput, explain
from polar.evaluators.swebench import SweRow

_NOT_GRADED_WITH = {"patch", "problem_statement", "files"}
"""The gold patch goes nowhere near a session: it is the task's solution, which is never submitted. The others
are the task's own, and checked with it."""
_TOLD = ("repo", "version", "base_commit")


def is_swe_row(columns: Mapping[str, Any]) -> bool:
    """Whether the columns are those of a SWE-bench dataset; no task has a field of these names."""
    return "instance_id" in columns and "FAIL_TO_PASS" in columns


def swe_task(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a task that follow from a row: all but its harness and, without `files`, its image.

    InvalidInput names the column that is wrong.
    """
    try:
        row = SweRow.model_validate({name: columns[name] for name in columns if name not in _NOT_GRADED_WITH})
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None
    problem = columns.get("problem_statement")
    if not isinstance(problem, str) or not problem.strip():
        raise InvalidInput("problem_statement: must be text that says what is to be done")
    files = columns.get("files") or {}
    if isinstance(files, Mapping):
        # The repository that a row carries; plain text stands for a file that holds it.
        files = {path: {"text": file} if isinstance(file, str) else file for path, file in files.items()}
    graded = row.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    told = {name: value for name in _TOLD if (value := getattr(row, name))}
    task = {
        "id": re.sub(r"[^A-Za-z0-9._-]", "-", row.instance_id),
        "instruction": problem,
        "files": files,
        "evaluator": {"name": "swebench", "options": {"row": graded}},
        "metadata": {"instance_id": row.instance_id, **told},
    }
    patch = columns.get("patch")
    if isinstance(patch, str) and patch.strip():
        # Applied as the hidden tests' patch is: with git where there is a repository, else without.
        script = 'git apply --whitespace=nowarn "$POLAR_SOLUTION/gold.patch"'
        task["solution"] = {"script": script, "files": {"gold.patch": {"text": patch}}}
    return task
