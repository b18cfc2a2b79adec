"""What came of reading tasks: those that are sound, and everything that is wrong with the others."""

from __future__ import annotations

from dataclasses import dataclass

from polar.errors import InvalidInput
from polar.models.task import TaskSpec

MAX_PROBLEMS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Loaded:
    """Tasks in order with different ids; a problem is one line that names file, place and field."""

    tasks: tuple[TaskSpec, ...]
    problems: tuple[str, ...] = ()

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
