"""`polar` with a clock that can be set; loaded once, in the process that all parts are forked from."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

true_time = time.time
off_by: Path | None = None
"""A file that says by how many seconds the clock of this process is off."""


def time_off() -> float:
    return true_time() if off_by is None else true_time() + float(off_by.read_text() or 0)


# Before anything of Polar is imported, which may keep the function.
time.time = time_off

from importlib import import_module  # noqa: E402

from polar.cli.main import main  # noqa: E402

for command in ("polar.cli.node", "polar.cli.serve", "polar.app.stack"):
    import_module(command)


def run(arguments: list[str], clock: Path) -> None:
    """The command line with these arguments."""
    global off_by
    off_by = clock
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.argv = ["polar", *arguments]
    main()
