"""A report as Markdown, with its plots as SVG files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from polar.evals.comparison import Comparison
from polar.evals.grids import Grid, comparison_grids, facts, report_grids, task_grids
from polar.evals.plots import TITLES
from polar.evals.report import Report

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")


def report_markdown(report: Report, comparison: Comparison | None, plots: Iterable[str]) -> str:
    """The whole report; `plots` are the names of the drawings in `plots/`."""
    grids = [
        *report_grids(report),
        *(comparison_grids(comparison) if comparison else ()),
        *task_grids(report),
    ]
    parts = [
        "# Evaluation",
        _facts(report),
        _grid(grids[0]),
        *(f"![{TITLES[name]}](plots/{name}.svg)" for name in plots),
        *map(_grid, grids[1:]),
    ]
    return "\n\n".join(parts) + "\n"


def comparison_markdown(comparison: Comparison) -> str:
    return "\n\n".join(["# Comparison", *map(_grid, comparison_grids(comparison))]) + "\n"


def _facts(report: Report) -> str:
    return _escaped(facts(report))


def _grid(grid: Grid) -> str:
    return "\n".join(_lines(grid))


def _lines(grid: Grid) -> Iterator[str]:
    yield f"## {_escaped(grid.title)}"
    yield ""
    yield _row(grid.columns)
    yield _row(["---" if at < grid.words else "---:" for at in range(len(grid.columns))], escape=False)
    yield from (_row(row) for row in grid.rows)
    if grid.note:
        yield ""
        yield _escaped(grid.note)


def _row(cells: Iterable[str], *, escape: bool = True) -> str:
    return f"| {' | '.join(_escaped(cell) if escape else cell for cell in cells)} |"


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)
