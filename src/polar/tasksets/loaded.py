"""What came of reading tasks: those that are sound, and everything that is wrong with the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polar.errors import InvalidInput
from polar.models.task import Solution, TaskSpec

MAX_PROBLEMS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tasks in order with different ids; a problem is one line that names file, place and field."""

    tasks: tuple[TaskSpec, ...]
    problems: tuple[str, ...] = ()
    solutions: Mapping[str, Solution] = field(default_factory=dict)
    """Task id → how it can be solved, where its author says so. Kept apart: no session comes near it."""

    def all_or_nothing(self) -> tuple[TaskSpec, ...]:
        """The tasks if there is no problem; else InvalidInput that lists them."""
        if self.problems:
            raise InvalidInput(listing(self.problems))
        return self.tasks


def listing(problems: tuple[str, ...]) -> str:
    """The problems as one message: a single one on its line, many as a list with the rest counted."""
    if len(problems) == 1:
        return problems[0]
    shown = list(problems[:MAX_PROBLEMS_SHOWN])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    return "\n  ".join([f"{len(problems)} problems:", *shown])
