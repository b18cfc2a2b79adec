"""An evaluation's tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from polar.cli.output import table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from polar.evals.grids import Grid


def grid_parts(grid: Grid) -> Iterator[RenderableType]:
    """A title, the table, and its note."""
    from rich.text import Text

    columns = [column.upper() for column in grid.columns]
    yield Text(grid.title, style="bold")
    yield table(columns, grid.rows, numbers=columns[grid.words :])
    if grid.note:
        yield Text(grid.note, style="dim")
