"""`polar examples`: the example tasks and runs that come with Polar, as files to read and change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def examples(
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")] = Path("examples"),
) -> None:
    """Copy the packaged examples here.

    Writes the tasks of `polar quickstart` and the files of a small training run, under the names that the
    documentation gives them. A clone of the project has them already. Files that differ are never
    overwritten.

    Example: polar examples  then  polar train examples/grpo-pi/tiny.yaml
    """
    from polar.assets.shipped import copy_examples

    for path in copy_examples(into):
        typer.echo(path)
