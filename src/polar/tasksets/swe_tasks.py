"""Rows of SWE-bench, SWE-Gym and similar datasets as tasks, graded by the evaluator `swebench`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polar.errors import InvalidInput, explain
from polar.evaluators.swebench import SweRow

_NOT_FOR_EVALUATOR = {"patch", "problem_statement", "files"}
"""Columns that do not go into the evaluator's row: the gold patch is the solution and is never submitted,
and the others become fields of the task."""
_METADATA_COLUMNS = ("repo", "version", "base_commit")


def is_swe_row(columns: Mapping[str, Any]) -> bool:
    """Whether the columns are those of a SWE-bench dataset; no task has fields of these names."""
    return "instance_id" in columns and "FAIL_TO_PASS" in columns


def swe_task(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task fields that a row determines; InvalidInput names a column that is wrong."""
    try:
        row = SweRow.model_validate(
            {name: columns[name] for name in columns if name not in _NOT_FOR_EVALUATOR}
        )
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None
    problem = columns.get("problem_statement")
    if not isinstance(problem, str) or not problem.strip():
        raise InvalidInput("problem_statement: must be text that says what to do")
    files = columns.get("files") or {}
    if isinstance(files, Mapping):
        # The row may carry the repository; a plain text is the content of a file.
        files = {path: {"text": file} if isinstance(file, str) else file for path, file in files.items()}
    graded = row.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    told = {name: value for name in _METADATA_COLUMNS if (value := getattr(row, name))}
    task = {
        "id": re.sub(r"[^A-Za-z0-9._-]", "-", row.instance_id),
        "instruction": problem,
        "files": files,
        "evaluator": {"name": "swebench", "options": {"row": graded}},
        "metadata": {"instance_id": row.instance_id, **told},
    }
    patch = columns.get("patch")
    if isinstance(patch, str) and patch.strip():
        # Applied like the hidden tests' patch: with git if there is a repository, else without.
        script = 'git apply --whitespace=nowarn "$POLAR_SOLUTION/gold.patch"'
        task["solution"] = {"script": script, "files": {"gold.patch": {"text": patch}}}
    return task
