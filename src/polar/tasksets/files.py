"""Tasks from files: every problem in them is found at once, and named by file, task and field."""

from __future__ import annotations

import base64
import difflib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polar import plugins
from polar.errors import InvalidInput
from polar.models.task import TaskSpec
from polar.tasksets.defaults import check_defaults, with_defaults
from polar.tasksets.documents import FORMATS, Format, guess_format, parse

MAX_PROBLEMS_SHOWN = 20
STDIN = Path("-")
_COMPONENTS = {
    "harness": "harnesses",
    "evaluator": "evaluators",
    "runtime": "runtimes",
    "builder": "builders",
}


def load_tasks(*paths: Path) -> list[TaskSpec]:
    """The tasks in files or directories (`-`: standard input), in order, all valid or none.

    A file holds one task, a list of tasks, or `defaults:` with `tasks:`. A directory stands for
    the task files directly in it, sorted by name.
    """
    tasks: list[TaskSpec] = []
    problems: list[str] = []
    origins: dict[str, str] = {}
    for path in _task_files(paths):
        try:
            loaded = _load_file(path, problems)
        except InvalidInput as error:
            problems.append(error.message)
            continue
        for task in loaded:
            if task.id in origins:
                problems.append(f"{_name(path)}: task {task.id!r}: id: already used in {origins[task.id]}")
            origins.setdefault(task.id, _name(path))
            tasks.append(task)
    if problems:
        raise InvalidInput(_listing(problems))
    return tasks


def _task_files(paths: tuple[Path, ...]) -> Iterator[Path]:
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        files = [
            file
            for file in path.iterdir()
            if file.suffix in FORMATS and file.is_file() and not file.name.startswith(".")
        ]
        if not files:
            raise InvalidInput(f"{path}: no task files in this directory", hint=f"looked for {_suffixes()}")
        yield from sorted(files)


def _load_file(path: Path, problems: list[str]) -> list[TaskSpec]:
    name = _name(path)
    directory = Path.cwd() if path == STDIN else path.parent
    document = _read(path)
    defaults, entries = _split(document, name)
    found, defaults = check_defaults(defaults)
    problems += [f"{name}: {problem}" for problem in found]
    tasks = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            problems.append(f"{name}: task {number}: must be a mapping, not {_kind(entry)}")
            continue
        label = f"task {entry['id']!r}" if isinstance(entry.get("id"), str) else f"task {number}"
        found = []
        task = _task(with_defaults(entry, defaults), directory, found)
        problems += [f"{name}: {label}: {problem}" for problem in found]
        if task is not None:
            tasks.append(task)
    return tasks


def _read(path: Path) -> Any:
    if path == STDIN:
        text = sys.stdin.read()
        return parse(text, guess_format(text), _name(path))
    format = FORMATS.get(path.suffix)
    if format is None:
        raise InvalidInput(f"{path}: not a task file: its name must end in {_suffixes()}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: not UTF-8 text (byte {error.start})") from None
    if format is not Format.JSONL and not text.strip():
        raise InvalidInput(f"{path}: the file is empty")
    return parse(text, format, str(path))


def _split(document: Any, name: str) -> tuple[Any, list[Any]]:
    """A document's defaults and its tasks, whichever of its three forms it has."""
    if isinstance(document, list):
        entries: Any = document
        defaults: Any = {}
    elif not isinstance(document, dict):
        raise InvalidInput(f"{name}: must be a task, a list of tasks, or 'defaults' and 'tasks'")
    elif "tasks" not in document and "defaults" not in document:
        return {}, [document]
    else:
        unknown = sorted(str(key) for key in document.keys() - {"defaults", "tasks"})
        if unknown:
            raise InvalidInput(f"{name}: unknown key {unknown[0]!r} beside 'defaults' and 'tasks'")
        defaults, entries = document.get("defaults") or {}, document.get("tasks")
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(f"{name}: tasks: must be a list of at least one task")
    return defaults, entries


def _task(document: dict[str, Any], directory: Path, problems: list[str]) -> TaskSpec | None:
    document = _with_contents(document, "files", directory, problems)
    evaluator = document.get("evaluator")
    if isinstance(evaluator, dict) and isinstance(evaluator.get("options"), dict):
        # Evaluators bring files of their own, which the agent must not see.
        options = _with_contents(evaluator["options"], "evaluator.options.files", directory, problems)
        document["evaluator"] = {**evaluator, "options": options}
    if problems:
        return None
    try:
        task = TaskSpec.model_validate(document)
    except ValidationError as error:
        problems += [_explain(item) for item in error.errors(include_url=False, include_context=False)]
        return None
    for field, kind in _COMPONENTS.items():
        component = getattr(task, field)
        # A name unknown here may be known to the server, which refuses it if it is not.
        if component.name in plugins.names(kind):
            try:
                plugins.options(kind, field, component)
            except InvalidInput as error:
                problems.append(error.message)
            except ImportError as error:
                problems.append(f"{field}.name: {component.name!r} cannot be loaded here: {error}")
    return None if problems else task


def _with_contents(
    document: dict[str, Any], field: str, directory: Path, problems: list[str]
) -> dict[str, Any]:
    """The document with its `files` read in; `field` is their name in problems."""
    files = document.get("files")
    if not isinstance(files, dict):
        return dict(document)
    read = {name: _read_in(f"{field}.{name}", file, directory, problems) for name, file in files.items()}
    return {**document, "files": read}


def _read_in(target: str, content: Any, directory: Path, problems: list[str]) -> Any:
    """A file's content with `path` replaced by what that path holds, as `text` or `base64`."""
    if not isinstance(content, dict) or "path" not in content:
        return content
    field = f"{target}.path"
    source = content["path"]
    rest = {key: value for key, value in content.items() if key != "path"}
    if not isinstance(source, str):
        problems.append(f"{field}: must be a string")
        return content
    if {"text", "base64"} & rest.keys():
        problems.append(f"{target}: needs exactly one of 'text', 'base64' and 'path'")
        return content
    try:
        # Resolving first follows links and '..', so that neither leads out of the directory.
        file = (directory / source).resolve()
        if not file.is_relative_to(directory.resolve()):
            problems.append(f"{field}: {source!r} leads out of the task file's directory")
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


def _explain(item: Any) -> str:
    """One of pydantic's errors in words of the file."""
    field = ".".join(map(str, item["loc"])) or "task"
    if item["type"] == "missing":
        return f"{field}: is required"
    if item["type"] == "extra_forbidden":
        near = difflib.get_close_matches(field, TaskSpec.model_fields, n=1)
        return f"{field}: unknown key" + (f" (did you mean {near[0]!r}?)" if near else "")
    return f"{field}: {item['msg'].removeprefix('Value error, ')}"


def _listing(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    shown = problems[:MAX_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return "\n  ".join([f"{len(problems)} problems:", *shown])


def _name(path: Path) -> str:
    return "standard input" if path == STDIN else str(path)


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _suffixes() -> str:
    return ", ".join(FORMATS)
