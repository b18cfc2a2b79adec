"""One way in which an agent tries to get a reward that it did not earn."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a task is graded with, and so what an attack on its grading aims at."""

    ANY = "any"
    """Fits every task."""
    PYTHON = "python"
    """Some Python program runs while the task is graded."""
    PYTEST = "pytest"
    NODE = "node"
    CARGO = "cargo"
    MAKE = "make"


@dataclass(frozen=True, slots=True)
class Attack:
    """What a cheating agent does instead of the task."""

    name: str
    """Unique, in words joined by hyphens."""
    description: str
    """What it tries, for people who read that it succeeded."""
    kind: Kind
    files: Mapping[str, str] = field(default_factory=dict)
    """Path → content of what it leaves: in the workspace, or below `~/` in its home."""
    script: str = ""
    """Run by `/bin/sh` in the workspace after its files are there; its exit code says nothing."""

    @property
    def command(self) -> str:
        """The whole attack as one shell script, to be run in the sandbox as the agent."""
        return "\n".join([*(_write(path, text) for path, text in self.files.items()), self.script, "true"])


def _write(path: str, text: str) -> str:
    place = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
    return f'mkdir -p "$(dirname {place})" && printf %s {shlex.quote(text)} > {place}'
