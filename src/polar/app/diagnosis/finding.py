"""What was looked at, what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum

from polar.errors import PolarError
from polar.models.component import Frozen


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, but less well than it could, or something that not everybody needs does not."""
    PROBLEM = "problem"
    """Sessions will fail."""


class Finding(Frozen):
    """One thing that was looked at."""

    area: str
    name: str
    level: Level
    detail: str
    fix: str | None = None
    """What to do; None where there is nothing to be done."""


class Area:
    """Names the findings of one area."""

    def __init__(self, name: str) -> None:
        self.name = name

    def ok(self, name: str, detail: str) -> Finding:
        return Finding(area=self.name, name=name, level=Level.OK, detail=detail)

    def warning(self, name: str, detail: str, fix: str | None = None) -> Finding:
        return Finding(area=self.name, name=name, level=Level.WARNING, detail=detail, fix=fix)

    def problem(self, name: str, detail: str, fix: str | None = None) -> Finding:
        return Finding(area=self.name, name=name, level=Level.PROBLEM, detail=detail, fix=fix)

    async def examined(self, name: str, look: Callable[[], Awaitable[Finding]]) -> Finding:
        """What a look finds; what keeps it from looking is a problem itself."""
        try:
            return await look()
        except PolarError as error:
            return self.problem(name, error.message, error.hint)
