"""How far a generation is, counted as sessions end and shown to whoever watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from polar.models.session import SessionResult, SessionStatus

LINE_SECONDS = 10.0
"""How often a line is printed where no terminal shows a bar."""


@dataclass(slots=True)
class Tally:
    """Counts of ended sessions; a session that is tried again counts once, as it ends at last."""

    wanted: int
    ended: int = 0
    accepted: int = 0
    failed: int = 0
    retried: int = 0
    found: int = 0
    """Of those ended: how many had ended before this run began."""
    sampled_tokens: int = 0
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def add(self, result: SessionResult, *, is_accepted: bool, was_found: bool) -> None:
        self.ended += 1
        self.accepted += is_accepted
        self.failed += result.status is SessionStatus.FAILED
        self.found += was_found
        self.sampled_tokens += 0 if was_found else result.stats.sampled_tokens

    @property
    def seconds(self) -> float:
        return max(self.clock() - self._began, 1e-9)

    @property
    def per_minute(self) -> float:
        """Sessions ended by this run; what an earlier one did says nothing of the speed."""
        return 60 * (self.ended - self.found) / self.seconds

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.ended if self.ended else None

    @property
    def seconds_left(self) -> float | None:
        left = self.wanted - self.ended
        if not left:
            return 0.0
        return 60 * left / self.per_minute if self.per_minute else None

    def line(self) -> str:
        accepted = "–" if self.acceptance is None else f"{self.acceptance:.0%}"
        left = "–" if self.seconds_left is None else _duration(self.seconds_left)
        parts = [
            f"{self.ended}/{self.wanted} sessions",
            f"{self.accepted} accepted ({accepted})",
            *([f"{self.failed} failed"] if self.failed else []),
            *([f"{self.retried} retried"] if self.retried else []),
            f"{self.per_minute:.1f} sessions/min",
            f"{self.sampled_tokens / self.seconds:.0f} tokens/s",
            f"{left} left",
        ]
        return " · ".join(parts)


class _Line(ProgressColumn):
    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def render(self, task: Task) -> Text:
        return Text(self._tally.line())


@contextmanager
def shown(tally: Tally, console: Console) -> Iterator[Callable[[], None]]:
    """Show the tally while the body runs; it calls what it is given after every change."""
    if console.is_terminal:
        with Progress(TextColumn("generating"), BarColumn(), _Line(tally), console=console) as progress:
            bar = progress.add_task("", total=tally.wanted)
            yield lambda: progress.update(bar, completed=tally.ended)
        return
    printed = tally.clock()

    def say() -> None:
        nonlocal printed
        if tally.clock() - printed >= LINE_SECONDS:
            printed = tally.clock()
            console.print(tally.line(), markup=False, soft_wrap=True)

    yield say
    console.print(tally.line(), markup=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
