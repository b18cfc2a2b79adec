"""One row of a taskset's source: what filters and templates read, and the task that follows from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from polar.models.component import Frozen


@dataclass(frozen=True, slots=True)
class Row:
    """A row that could be read."""

    where: str
    """For people: `rows.jsonl:17`, `train.parquet: row 3`."""
    columns: Mapping[str, Any]
    task: Mapping[str, Any] | None = None
    """The fields of a task that the source itself makes of the row; None: it is data, and `columns` and
    `template` say what they mean."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read; the others can."""

    where: str
    problem: str


class RowSource(ABC):
    """One kind of source; registered by name under `polar.tasksets`, so that a package can add one."""

    class Options(Frozen):
        """What a taskset says of the source."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        """The rows of the source at `place`, one at a time; InvalidInput if it cannot be read at all.

        `place` is what the taskset names as its source, `split` which part of it is wanted.
        """
