"""Tasks from files and directories of every form: task files, tasksets, and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar.config.documents import STDIN, parse_json, parse_yaml, read_text
from polar.errors import InvalidInput
from polar.models.task import Solution, TaskSpec
from polar.tasksets.harbor import is_harbor
from polar.tasksets.rows import BadRow
from polar.tasksets.task_document import check_defaults, check_task, with_defaults
from polar.tasksets.taskset import TaskDocument, is_saved_dataset, make_taskset

SUFFIXES = (".yaml", ".yml", ".json", ".jsonl")
_ROWS = (".jsonl", ".parquet", ".arrow")
_KNOWN = ", ".join([*SUFFIXES, ".parquet"])
DESCRIPTION = "taskset.yaml"
"""Describes the taskset of a directory."""


def load_tasks(*paths: Path) -> list[TaskSpec]:
    """Load the tasks of files or directories, all valid or none: InvalidInput lists every problem."""
    return list(read_tasks(*paths).all_or_nothing())


def read_tasks(*paths: Path, over: Mapping[str, Any] | None = None, seed: int | None = None) -> Loaded:
    """Read the tasks of files or directories (`-` is standard input), in order, with all problems.

    A file holds one task, a list of tasks, `defaults:` with `tasks:`, the description of a taskset (with
    `source:` or `format:`), or rows (JSON Lines, parquet). A directory stands for the taskset.yaml in it, for
    Harbor tasks, for a saved dataset, or for the task files directly in it, sorted by name. The fields in
    `over` override those of every task. With a seed, each task gets its own seed derived from it: with one
    for all, tasks would draw alike and be lucky together.
    """
    tasks: dict[str, TaskSpec] = {}
    solutions: dict[str, Solution] = {}
    problems: list[str] = []
    origins: dict[str, str] = {}
    for made in _documents(paths, problems):
        if isinstance(made, BadRow):
            problems.append(f"{made.where}: {made.problem}")
            continue
        document = with_defaults(dict(over), dict(made.document)) if over else made.document
        task, solution, found = check_task(document, made.directory)
        label = (
            f"{made.where}: task {document['id']!r}" if isinstance(document.get("id"), str) else made.where
        )
        problems += [f"{label}: {problem}" for problem in found]
        if task is None:
            continue
        if task.id in origins:
            problems.append(f"{label}: id: already used in {origins[task.id]}")
            continue
        origins[task.id] = made.where
        tasks[task.id] = task if seed is None else _with_seed(task, seed)
        if solution is not None:
            solutions[task.id] = solution
    return Loaded(tuple(tasks.values()), tuple(problems), solutions)


def _with_seed(task: TaskSpec, seed: int) -> TaskSpec:
    text = f"{seed}/{task.id}/{task.instruction}"
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    sampling = task.sampling.model_copy(update={"seed": int.from_bytes(digest, "big")})
    return task.model_copy(update={"sampling": sampling})


def _documents(paths: tuple[Path, ...], problems: list[str]) -> Iterator[TaskDocument | BadRow]:
    for path in paths:
        for part in _parts(path):
            try:
                yield from _read(part)
            except InvalidInput as error:
                problems.append(str(error))


def _parts(path: Path) -> list[Path]:
    """Return the path itself, or the task files in a directory without another form."""
    if not path.is_dir():
        return [path]
    if (path / DESCRIPTION).is_file():
        return [path / DESCRIPTION]
    if is_harbor(path) or is_saved_dataset(path):
        return [path]
    files = [file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file()]
    if files := sorted(file for file in files if not file.name.startswith(".")):
        return files
    if any(path.rglob("*.parquet")):
        return [path]
    raise InvalidInput(f"{path}: no task files in this directory", hint=f"looked for {_KNOWN}")


def _read(path: Path) -> Iterator[TaskDocument | BadRow]:
    name = "standard input" if path == STDIN else str(path)
    directory = Path.cwd() if path == STDIN else path.parent
    if path.is_dir() or path.suffix in _ROWS:
        yield from make_taskset({"source": path.name}, directory, name).documents()
        return
    document = _document(path, name)
    if isinstance(document, dict) and {"source", "format"} & document.keys():
        yield from make_taskset(document, directory, name).documents()
        return
    defaults, entries = _split(document, name)
    found, defaults = check_defaults(defaults)
    yield from (BadRow(name, problem) for problem in found)
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, dict):
            where = name if isinstance(entry.get("id"), str) else f"{name}: task {number}"
            yield TaskDocument(where, with_defaults(entry, defaults), directory)
        else:
            kind = "nothing" if entry is None else f"a {type(entry).__name__}"
            yield BadRow(f"{name}: task {number}", f"must be a mapping, not {kind}")


def _document(path: Path, name: str) -> Any:
    text = read_text(path)
    if path == STDIN:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        if len(lines) > 1 and all(_is_json_object(line) for _, line in lines):
            return [parse_json(line, name, number) for number, line in lines]
    elif path.suffix not in SUFFIXES:
        raise InvalidInput(f"{path}: not a task file: its name must end in {_KNOWN}")
    elif not text.strip():
        raise InvalidInput(f"{path}: the file is empty")
    elif path.suffix == ".json":
        return parse_json(text, name)
    return parse_yaml(text, name)


def _is_json_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _split(document: Any, name: str) -> tuple[Any, list[Any]]:
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


MAX_PROBLEMS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tasks in order with unique ids; a problem is one line that names file, place and field."""

    tasks: tuple[TaskSpec, ...]
    problems: tuple[str, ...] = ()
    solutions: Mapping[str, Solution] = field(default_factory=dict)
    """Solutions by task id, where the author provides them, kept apart from sessions."""

    def all_or_nothing(self) -> tuple[TaskSpec, ...]:
        """Return the tasks; raise InvalidInput with all problems if there are any."""
        if self.problems:
            raise InvalidInput(listing(self.problems))
        return self.tasks


def listing(problems: tuple[str, ...]) -> str:
    """Format problems as one message: a single one on its line, many as a list that counts the rest."""
    if len(problems) == 1:
        return problems[0]
    shown = list(problems[:MAX_PROBLEMS_SHOWN])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return "\n  ".join([f"{len(problems)} problems:", *shown])
