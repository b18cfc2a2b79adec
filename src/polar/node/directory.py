"""A node's directory, which only one process works in: two would reap each other's sandboxes."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from polar.errors import PolarError


def node_directory(data_dir: Path, name: str) -> Path:
    """A node's own below the data directory."""
    return (data_dir / "nodes" / name).absolute()


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the directory while the body runs; the system lets it go when the process dies."""
    with _locked(directory):
        yield


def _locked(directory: Path) -> TextIO:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "lock").open("w")
    except OSError as error:
        raise PolarError(f"{directory} cannot be used: {error.strerror}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise PolarError(
            f"a node called {directory.name} is at work here already ({directory})",
            hint="a second `polar serve` needs another --data-dir, a second `polar node` another --name",
        ) from None
    return file
