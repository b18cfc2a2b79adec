"""A node's directory, which only one process works in: two would reap each other's sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.errors import PolarError
from polar.files import locked


def node_directory(data_dir: Path, name: str) -> Path:
    """A node's own below the data directory."""
    return (data_dir / "nodes" / name).absolute()


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold the directory while the body runs; the system lets it go when the process dies."""
    taken = PolarError(
        f"a node called {directory.name} is at work here already ({directory})",
        hint="a second `polar serve` needs another --data-dir, a second `polar node` another --name",
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "lock").touch()
    except OSError as error:
        raise PolarError(f"{directory} cannot be used: {error.strerror}") from None
    with locked(directory / "lock", busy=taken):
        yield
