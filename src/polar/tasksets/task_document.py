"""One task as a document: merged with defaults, its files read, every problem named by field."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar.config import plugins
from polar.errors import InvalidInput, likely
from polar.errors import problems as problems_in
from polar.harnesses.base import check_tools
from polar.models.component import Component
from polar.models.task import Solution, TaskSpec

SOLUTION = "solution"
"""The only field of a task document that is not part of the task."""
FIELDS = frozenset((*TaskSpec.model_fields, SOLUTION))


def check_task(
    document: Mapping[str, Any], directory: Path
) -> tuple[TaskSpec | None, Solution | None, list[str]]:
    """Return the task and its solution, or their problems; files' `path`s are relative to `directory`."""
    solution, problems = _check_solution(document.get(SOLUTION), directory)
    task, found = _check_spec({key: document[key] for key in document if key != SOLUTION}, directory)
    problems = [*found, *problems]
    return (None, None, problems) if problems else (task, solution, [])


def _check_solution(document: Any, directory: Path) -> tuple[Solution | None, list[str]]:
    if document is None:
        return None, []
    problems: list[str] = []
    written = {"script": document} if isinstance(document, str) else document
    if isinstance(written, Mapping):
        written = _with_contents(written, f"{SOLUTION}.files", directory, problems)
    if problems:
        return None, problems
    try:
        return Solution.model_validate(written), []
    except ValidationError as error:
        return None, problems_in(error.errors(), within=SOLUTION)


def _check_spec(document: Mapping[str, Any], directory: Path) -> tuple[TaskSpec | None, list[str]]:
    problems: list[str] = []
    document = _with_contents(document, "files", directory, problems)
    evaluator = document.get("evaluator")
    if isinstance(evaluator, dict) and isinstance(evaluator.get("options"), dict):
        # Evaluators have files of their own, which the agent must not see.
        options = _with_contents(evaluator["options"], "evaluator.options.files", directory, problems)
        document["evaluator"] = {**evaluator, "options": options}
    if problems:
        return None, problems
    try:
        task = TaskSpec.model_validate(document)
    except ValidationError as error:
        return None, problems_in(error.errors(), known=FIELDS)
    for kind, field, component in task.components:
        # A name unknown here may be known to the server, which refuses it if it is not.
        if component.name in plugins.names(kind):
            # Most tasks of a set share components, but each has its own evaluator options.
            if field == "evaluator":
                problem = _problem(kind, field, component)
            else:
                problem = _known_problem(kind, field, component.name, json.dumps(component.options))
            problems += [problem] if problem else []
    problems = problems or _tool_problems(task)
    return (None, problems) if problems else (task, [])


def _tool_problems(task: TaskSpec) -> list[str]:
    try:
        check_tools(task)
    except plugins.UnknownName:
        return []
    except InvalidInput as error:
        return [str(error)]
    return []


def _problem(kind: str, field: str, component: Component) -> str | None:
    try:
        plugins.options(kind, field, component)
    except plugins.UnknownName:
        # The same holds for a component within this one.
        return None
    except InvalidInput as error:
        return error.message
    except ImportError as error:
        return f"{field}.name: {component.name!r} cannot be loaded here: {error}"
    return None


@lru_cache(maxsize=64)
def _known_problem(kind: str, field: str, name: str, options: str) -> str | None:
    return _problem(kind, field, Component(name=name, options=json.loads(options)))


def unknown_names(task: TaskSpec) -> list[str]:
    """Return the components that are not installed here, as `field 'name'`."""
    unknown = []
    for kind, field, component in task.components:
        try:
            plugins.options(kind, field, component)
        except plugins.UnknownName as error:
            unknown.append(f"{field} {error.name!r}{likely(error.name, plugins.names(kind))}")
    return unknown


def _with_contents(
    document: Mapping[str, Any], field: str, directory: Path, problems: list[str]
) -> dict[str, Any]:
    """Read the `files` of a document; `field` is their name in problems."""
    files = document.get("files")
    if not isinstance(files, dict):
        return dict(document)
    read = {name: _read_content(f"{field}.{name}", file, directory, problems) for name, file in files.items()}
    return {**document, "files": read}


def _read_content(target: str, content: Any, directory: Path, problems: list[str]) -> Any:
    """Replace a file's `path` by the content at that path, as `text` or `base64`."""
    if not isinstance(content, dict) or "path" not in content:
        return content
    field = f"{target}.path"
    source = content["path"]
    rest = {key: value for key, value in content.items() if key != "path"}
    if not isinstance(source, str):
        problems.append(f"{field}: must be a string")
        return content
    if {"text", "base64"} & rest.keys():
        problems.append(f"{target}: must have exactly one of 'text', 'base64' and 'path'")
        return content
    try:
        # Resolving first prevents links and '..' from leading out of the directory.
        file = (directory / source).resolve()
        if not file.is_relative_to(directory.resolve()):
            problems.append(f"{field}: {source!r} is outside the task file's directory")
            return content
        data = file.read_bytes()
        rest.setdefault("executable", os.access(file, os.X_OK))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        problems.append(f"{field}: {source!r} cannot be read: {reason}")
        return content
    try:
        return {**rest, "text": data.decode()}
    except UnicodeDecodeError:
        return {**rest, "base64": base64.b64encode(data).decode()}


_COMPONENTS = ("harness", "evaluator", "runtime", "builder")
_BY_KEY = ("budgets", "sampling", "branching", "files", "metadata", "tools")
"""Fields merged key by key; of all others the task's own value stands alone."""


def check_defaults(defaults: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the problems of `defaults` itself, reported once instead of for every task, and the rest."""
    if not isinstance(defaults, dict):
        return ["defaults: must be a mapping of task fields"], {}
    allowed = TaskSpec.model_fields.keys() - {"id"}
    problems = [
        "defaults.id: every task must have its own id" if key == "id" else f"defaults.{key}: unknown key"
        for key in defaults
        if key not in allowed
    ]
    return problems, {key: value for key, value in defaults.items() if key in allowed}


def with_defaults(task: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **task}
    for key in task.keys() & defaults.keys():
        mine, under = task[key], defaults[key]
        if key in _COMPONENTS:
            merged[key] = _component(mine, under)
        elif key in _BY_KEY and isinstance(mine, dict) and isinstance(under, dict):
            merged[key] = {**under, **mine}
    return merged


def _component(mine: Any, under: Any) -> Any:
    """Merge options only if both name the same component: another's options would not fit."""
    under = {"name": under} if isinstance(under, str) else under
    if not isinstance(mine, dict) or not isinstance(under, dict):
        return mine
    if mine.get("name", under.get("name")) != under.get("name"):
        return mine
    merged = {**under, **mine}
    if isinstance(mine.get("options"), dict) and isinstance(under.get("options"), dict):
        merged["options"] = {**under["options"], **mine["options"]}
    return merged
