"""`polar compare`: what changed from one evaluation to another."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from polar.cli.options import AsJson
from polar.cli.output import print_json, print_parts, table
from polar.evals import comparison
from polar.evals.documents import comparison_files, write
from polar.evals.grids import Grid, comparison_grids
from polar.evals.report import load_report, only_harness


def compare(
    before: Annotated[Path, typer.Argument(help="The directory of an evaluation.")],
    after: Annotated[Path, typer.Argument(help="That of another one.")],
    before_harness: Annotated[str | None, typer.Option(help="Of BEFORE only this harness.")] = None,
    after_harness: Annotated[str | None, typer.Option(help="Of AFTER only this harness.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write comparison.html, .md and .json there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations, paired by task and sample.

    A task is the same one if it has the same id and asks and judges the same. Harnesses and models are
    paired with their own kind; where only one differs, that is what is compared. With the same directory
    twice and two harnesses, two harnesses of one evaluation.

    Examples:

      polar compare evals/base evals/trained
      polar compare evals/both evals/both --before-harness pi --after-harness codex
    """
    first = only_harness(load_report(before), before_harness)
    second = only_harness(load_report(after), after_harness)
    names = (f"{before} {before_harness or ''}".strip(), f"{after} {after_harness or ''}".strip())
    made = comparison.compare(first, second, names)
    if out:
        write(comparison_files(made), out)
    if as_json:
        print_json(made)
    else:
        print_grids(comparison_grids(made))


def print_grids(grids: Iterable[Grid]) -> None:
    """An evaluation's tables, each with its title and its note."""
    for grid in grids:
        columns = [column.upper() for column in grid.columns]
        numbers = [f">{column}" for column in columns[grid.words :]]
        note = [Text(grid.note, style="dim")] if grid.note else []
        made = table([*columns[: grid.words], *numbers], grid.rows)
        print_parts(Text(grid.title, style="bold"), made, *note, Text())
