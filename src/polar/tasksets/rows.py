"""The rows of a taskset's source: what filters and templates read, and tasks that sources make of them."""

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
    """The place for messages, such as `rows.jsonl:17` or `train.parquet: row 3`."""
    columns: Mapping[str, Any]
    task: Mapping[str, Any] | None = None
    """Task fields that the source derives from the row; None if `columns` and `template` define them."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that could not be read; others may be."""

    where: str
    problem: str


class RowSource(ABC):
    """One kind of source, registered by name under `polar.tasksets`, so that a package can add one."""

    class Options(Frozen):
        """The taskset's options for the source."""

    def __init__(self, options: BaseModel) -> None:
        self.options = options

    @abstractmethod
    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        """Yield the rows of one split of the taskset's source; raise InvalidInput if it cannot be read at
        all."""
