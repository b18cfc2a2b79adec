"""An environment that has the wheel and no clone, and its commands as a user runs them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Installed:
    """Where its programs are."""

    bin: Path

    def start(self, directory: Path, *arguments: str) -> subprocess.Popen[str]:
        """A command of it in a directory, as a user with that environment activated starts it."""
        return subprocess.Popen(
            [self.bin / arguments[0], *arguments[1:]],
            cwd=directory,
            env=_environment(self.bin),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, directory: Path, *arguments: str) -> str:
        with ended(self.start(directory, *arguments)) as process:
            said, _ = process.communicate(timeout=800)
        assert process.returncode == 0, said
        return said


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _environment(bin_directory: Path) -> dict[str, str]:
    """This one, without what would lead to the clone that the tests run in."""
    unwanted = ("PYTHONPATH", "VIRTUAL_ENV", "POLAR_TOKEN", "POLAR_URL", "POLAR_DATA_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "PATH": f"{bin_directory}:{os.environ['PATH']}", "COLUMNS": "200"}
