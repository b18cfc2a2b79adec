"""Agents that cheat: ways to obtain an unearned reward, for testing that none of them works.

Each is a shell script in the directory of its kind. `payloads` holds what scripts plant: programs that make a
test runner, a checker or a verifier report success. `prelude.sh` holds what scripts share. An `Exam` is a
small task on which an evaluator is attacked.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


class Kind(StrEnum):
    """The grader of a task, and so the target of an attack on it."""

    ANY = "any"
    """Applies to every task."""
    PYTHON = "python"
    """Applies if grading runs a Python program."""
    PYTEST = "pytest"
    NODE = "node"
    """Node.js or npm runs, whatever runner is used."""
    JEST = "jest"
    VITEST = "vitest"
    MOCHA = "mocha"
    BUN = "bun"
    MAKE = "make"
    CARGO = "cargo"


@dataclass(frozen=True, slots=True)
class Attack:
    """What a cheating agent does instead of its task."""

    name: str
    """Unique words joined by hyphens."""
    description: str
    """What it tries, for the report that it succeeded."""
    kind: Kind
    script: str
    """Run by `/bin/sh` in the workspace; its exit code is ignored."""

    @property
    def command(self) -> str:
        """The whole attack as one shell script, run in the sandbox as the agent."""
        return "\n".join([_PRELUDE, self.script, 'rm -rf "$payloads"', "true"])


@dataclass(frozen=True, slots=True)
class Exam:
    """A task on which an evaluator shows that work is rewarded and nothing else: its `exams` gives some."""

    kind: Kind
    """The grader: attacks on it are tried, and in one exam per evaluator those on every task."""
    options: Mapping[str, Any]
    """Options of the evaluator, with which doing nothing must be worth 0."""
    files: Mapping[str, str]
    """Workspace files by path."""
    solution: str
    """A shell script, run in the workspace, that does the work: worth 1."""
    label: str = ""
    """Tells exams of one evaluator and kind apart."""
    runtime_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of bubblewrap, for sandboxes that need more than a workspace."""


def _read_attack(file: Path) -> Attack:
    script = file.read_text()
    description = script.partition("\n")[0].removeprefix("# ")
    return Attack(file.stem, description, Kind(file.parent.name), script)


def _prelude() -> str:
    """Return a script that writes the payloads to a directory; one may include another as `@name@`."""
    forge = (_HERE / "payloads" / "forge.sh").read_text().rstrip()
    lines = ["payloads=$(mktemp -d)"]
    for file in sorted((_HERE / "payloads").iterdir()):
        text = file.read_text().replace("@forge.sh@", forge)
        lines.append(f'printf %s {shlex.quote(text)} > "$payloads"/{file.name}')
    return "\n".join([*lines, (_HERE / "prelude.sh").read_text()])


_PRELUDE = _prelude()

ATTACKS = tuple(_read_attack(file) for kind in Kind for file in sorted((_HERE / kind).glob("*.sh")))


def attacks_of_kinds(kinds: Collection[Kind]) -> tuple[Attack, ...]:
    """Return the attacks on tasks graded with these kinds, including those that apply to every task."""
    return tuple(attack for attack in ATTACKS if attack.kind is Kind.ANY or attack.kind in kinds)
