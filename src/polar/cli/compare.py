"""`polar compare`: what changed from one evaluation to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar.cli.options import AsJson


def compare(
    before: Annotated[Path, typer.Argument(help="The directory of an evaluation.", show_default=False)],
    after: Annotated[Path, typer.Argument(help="That of another one.", show_default=False)],
    before_harness: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Of BEFORE only this harness.")
    ] = None,
    after_harness: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Of AFTER only this harness.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write comparison.html, .md and .json there."),
    ] = None,
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
    from rich.text import Text

    from polar.cli.output import print_json, print_parts
    from polar.cli.report_tables import grid_parts
    from polar.evals import comparison
    from polar.evals.documents import comparison_files, write
    from polar.evals.grids import comparison_grids
    from polar.evals.report import load_report, only_harness

    first = only_harness(load_report(before), before_harness)
    second = only_harness(load_report(after), after_harness)
    names = (str(before), str(after))
    if before_harness or after_harness:
        names = (f"{before} {before_harness or ''}".strip(), f"{after} {after_harness or ''}".strip())
    made = comparison.compare(first, second, names)
    if out:
        write(comparison_files(made), out)
    if as_json:
        print_json(made)
        return
    for grid in comparison_grids(made):
        print_parts(*grid_parts(grid), Text())
