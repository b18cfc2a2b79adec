"""Describes a taskset: where rows come from, which ones are wanted, and how one becomes a task."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue, ValidationError

from polar.config import plugins
from polar.errors import InvalidInput, explain
from polar.evaluators.swebench import SweRow
from polar.models.component import Component, Frozen
from polar.tasksets.expressions import Condition, compile_template, parse_condition
from polar.tasksets.harbor import is_harbor
from polar.tasksets.rows import BadRow, Row, RowSource
from polar.tasksets.task_document import FIELDS, check_defaults, with_defaults

KIND = "tasksets"
_BY_SUFFIX = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "datasets"}


class TasksetSpec(Frozen):
    """The content of a taskset.yaml."""

    source: str | None = None
    """A file or directory, relative to the description; some plug-ins need none."""
    format: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9_]{0,63}$")
    """jsonl, parquet, datasets, harbor, or the name of a plug-in; if unset, derived from the source."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the format."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names for columns. A name that is a task field fills that field."""
    template: dict[str, JsonValue] = Field(default_factory=dict)
    """Task fields as jinja2 templates over the columns."""
    defaults: dict[str, JsonValue] = Field(default_factory=dict)
    """Default values of task fields, used where the row has none."""
    split: str | None = Field(default=None, min_length=1)
    filter: str | None = None
    """A condition on the columns; other rows are left out."""
    shuffle: int | None = None
    """A seed to shuffle the rows with; if unset, they stay in the source's order."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of rows, after filter and shuffle."""
    repeat: int = Field(default=1, ge=1, le=10_000)
    """Number of tasks made from each row; their ids end in their number."""


@dataclass(frozen=True, slots=True)
class TaskDocument:
    """A task as written or generated, before it is checked."""

    where: str
    document: Mapping[str, Any]
    directory: Path
    """The directory that its files are relative to."""


@dataclass(frozen=True, slots=True)
class Taskset:
    """A checked description, which can be read any number of times."""

    spec: TasksetSpec
    directory: Path
    _source: RowSource
    _make: Callable[[Mapping[str, Any]], dict[str, Any]]
    _wanted: Condition | None

    def documents(self) -> Iterator[TaskDocument | BadRow]:
        """Yield every task in order, one row at a time unless they are shuffled."""
        rows = self._matching_rows()
        if self.spec.shuffle is not None:
            shuffled = list(rows)
            random.Random(self.spec.shuffle).shuffle(shuffled)
            rows = iter(shuffled)
        for number, row in islice(rows, self.spec.limit):
            if isinstance(row, BadRow):
                yield row
            else:
                yield from self._tasks(row, number)

    def _matching_rows(self) -> Iterator[tuple[int, Row | BadRow]]:
        place = None if self.spec.source is None else self.directory / self.spec.source
        for number, row in enumerate(self._source.rows(place, self.spec.split), start=1):
            if isinstance(row, BadRow) or self._wanted is None:
                yield number, row
                continue
            try:
                if self._wanted(self._names(row, number)):
                    yield number, row
            except InvalidInput as error:
                yield number, BadRow(row.where, f"filter: {error.message}")

    def _names(self, row: Row, number: int) -> dict[str, Any]:
        renamed = {
            name: row.columns[column] for name, column in self.spec.columns.items() if column in row.columns
        }
        made = {} if row.task is None else {"task": row.task}
        return {"row": row.columns, **made, "number": number, **row.columns, **renamed}

    def _tasks(self, row: Row, number: int) -> Iterator[TaskDocument | BadRow]:
        names = self._names(row, number)
        try:
            fields = {**self._row_fields(row, names), **self._make(names)}
        except InvalidInput as error:
            yield BadRow(row.where, error.message)
            return
        fields.setdefault("id", f"row-{number}")
        document = with_defaults(fields, self.spec.defaults)
        if self.spec.repeat == 1:
            yield TaskDocument(row.where, document, self.directory)
            return
        for copy in range(1, self.spec.repeat + 1):
            yield TaskDocument(row.where, {**document, "id": f"{document['id']}-{copy}"}, self.directory)

    def _row_fields(self, row: Row, names: Mapping[str, Any]) -> Mapping[str, Any]:
        spec = self.spec
        named = {name: names[name] for name in spec.columns if name in FIELDS and name in names}
        if missing := [column for column in spec.columns.values() if column not in row.columns]:
            raise InvalidInput(
                f"columns: unknown column {missing[0]!r}; known: {', '.join(row.columns) or 'none'}"
            )
        if row.task is not None:
            return {**row.task, **named}
        if _is_swe_row(row.columns):
            return {**_swe_task(row.columns), **named}
        return named if spec.columns or spec.template else row.columns


def make_taskset(document: Any, directory: Path, name: str) -> Taskset:
    """Build the taskset that a document describes; InvalidInput names the key that is wrong."""
    try:
        spec = TasksetSpec.model_validate(document)
    except ValidationError as error:
        raise InvalidInput(f"{name}: {explain(error)}") from None
    problems, _ = check_defaults(spec.defaults)
    problems += [f"template.{field}: unknown key" for field in spec.template if field not in FIELDS]
    if problems:
        raise InvalidInput(f"{name}: {'; '.join(problems)}")
    try:
        format = spec.format or guess_source(None if spec.source is None else directory / spec.source)
        component = Component(name=format, options=spec.options)
        return Taskset(
            spec,
            directory,
            plugins.create(KIND, "taskset", component),
            compile_template(spec.template),
            parse_condition(spec.filter, "filter") if spec.filter is not None else None,
        )
    except InvalidInput as error:
        error.message = f"{name}: {error.message}"
        raise


def guess_source(place: Path | None) -> str:
    if place is None:
        raise InvalidInput("source: is required unless the format needs none")
    if not place.exists():
        raise InvalidInput(f"source: {place} cannot be read: No such file or directory")
    if not place.is_dir():
        if place.suffix in _BY_SUFFIX:
            return _BY_SUFFIX[place.suffix]
        raise InvalidInput(
            f"source: {place} has an unknown format", hint=f"set format to one of {_format_names()}"
        )
    if is_harbor(place):
        return "harbor"
    if is_saved_dataset(place):
        return "datasets"
    for suffix, format in _BY_SUFFIX.items():
        if any(place.rglob(f"*{suffix}")):
            return format
    raise InvalidInput(
        f"source: {place} has no files of a known format", hint=f"set format to one of {_format_names()}"
    )


def is_saved_dataset(directory: Path) -> bool:
    return (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()


def _format_names() -> str:
    return ", ".join(plugins.names(KIND))


_NOT_FOR_EVALUATOR = {"patch", "problem_statement", "files"}
"""Columns of SWE-bench rows that do not go into the evaluator's: the gold patch is the solution and is never
submitted, and the others become fields of the task."""
_METADATA_COLUMNS = ("repo", "version", "base_commit")


def _is_swe_row(columns: Mapping[str, Any]) -> bool:
    """Whether the columns are those of a SWE-bench dataset; no task has fields of these names."""
    return "instance_id" in columns and "FAIL_TO_PASS" in columns


def _swe_task(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the task fields that a SWE-bench row determines; InvalidInput names a column that is wrong."""
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
