"""Directories of Harbor tasks as rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from polar.errors import InvalidInput
from polar.evaluators.harbor_task import read_harbor_task
from polar.models.component import Frozen
from polar.tasksets.rows import BadRow, Row, RowSource

MARK = "task.toml"
_SOLVE = 'exec /bin/bash "$POLAR_SOLUTION/solve.sh"'


def is_harbor(directory: Path) -> bool:
    return (directory / MARK).is_file() or any(directory.glob(f"*/{MARK}"))


class HarborTasks(RowSource):
    """One task directory, or a directory of them; each row carries the task made from its files."""

    class Options(Frozen):
        runtime: str = "bubblewrap"
        """The runtime of the tasks."""
        ignore_unmet: bool = False
        """Run tasks whose Dockerfile requires more than copied files, because the host, or an image that
        the taskset names, has it."""

    options: Options

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        if place is None or not place.is_dir():
            raise InvalidInput(f"source: {place} is not a directory of Harbor tasks")
        if split is not None:
            place = place / split
        found = (
            [place] if (place / MARK).is_file() else sorted(file.parent for file in place.glob(f"*/{MARK}"))
        )
        if not found:
            raise InvalidInput(f"{place}: contains no Harbor tasks", hint=f"looked for {MARK}")
        for directory in found:
            yield self._row(directory)

    def _row(self, directory: Path) -> Row | BadRow:
        try:
            task = read_harbor_task(directory, ignore_unmet=self.options.ignore_unmet)
        except InvalidInput as error:
            where = str(directory)
            return BadRow(where, str(error).removeprefix(where).lstrip(":/ "))
        columns = {
            "name": task.name,
            "instruction": task.instruction,
            "workdir": task.workdir,
            "docker_image": task.config.environment.docker_image,
            "metadata": task.config.metadata,
        }
        fields = {
            "id": re.sub(r"[^A-Za-z0-9._-]", "-", task.name),
            **task.fields(runtime=self.options.runtime),
            "metadata": task.config.metadata,
        }
        if task.solution:
            files = {path: file.model_dump(exclude_none=True) for path, file in task.solution.items()}
            fields["solution"] = {"script": _SOLVE, "files": files}
        return Row(str(directory), columns, fields)
