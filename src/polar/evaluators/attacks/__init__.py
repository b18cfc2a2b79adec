"""Agents that cheat: ways to get a reward that was not earned, for whoever wants to see that none works.

Each is a shell script in the directory of its kind. `payloads` holds what scripts plant: programs that make a
test runner, a checker or a verifier say that all is well; `prelude.sh` holds what scripts share.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_HERE = Path(__file__).parent


class Kind(StrEnum):
    """What a task is graded with, and so what an attack on its grading aims at."""

    ANY = "any"
    """Fits every task."""
    PYTHON = "python"
    """Some Python program runs while the task is graded."""
    PYTEST = "pytest"
    NODE = "node"
    MAKE = "make"
    CARGO = "cargo"


@dataclass(frozen=True, slots=True)
class Attack:
    """What a cheating agent does instead of the task."""

    name: str
    """Unique, in words joined by hyphens."""
    description: str
    """What it tries, for people who read that it succeeded."""
    kind: Kind
    script: str
    """Run by `/bin/sh` in the workspace; its exit code says nothing."""

    @property
    def command(self) -> str:
        """The whole attack as one shell script, to be run in the sandbox as the agent."""
        return "\n".join([_PRELUDE, self.script, 'rm -rf "$payloads"', "true"])


def _read(file: Path) -> Attack:
    script = file.read_text()
    description = script.partition("\n")[0].removeprefix("# ")
    return Attack(file.stem, description, Kind(file.parent.name), script)


def _prelude() -> str:
    """Puts the payloads into a directory; one may hold another, by its name between two `@`."""
    forge = (_HERE / "payloads" / "forge.sh").read_text().rstrip()
    lines = ["payloads=$(mktemp -d)"]
    for file in sorted((_HERE / "payloads").iterdir()):
        text = file.read_text().replace("@forge.sh@", forge)
        lines.append(f'printf %s {shlex.quote(text)} > "$payloads"/{file.name}')
    return "\n".join([*lines, (_HERE / "prelude.sh").read_text()])


_PRELUDE = _prelude()

ATTACKS = tuple(_read(file) for kind in Kind for file in sorted((_HERE / kind).glob("*.sh")))


def fitting(kinds: Collection[Kind]) -> tuple[Attack, ...]:
    """The attacks on tasks that are graded with these; those that fit every task are always among them."""
    return tuple(attack for attack in ATTACKS if attack.kind is Kind.ANY or attack.kind in kinds)
