"""How many nodes a fleet should have: pure functions of its size as asked, its machines and the queue."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from polar.errors import InvalidInput

PER_HOST = "per-host"


@dataclass(frozen=True, slots=True)
class PerHost:
    """One node on every machine that has the resources, however many there are."""


@dataclass(frozen=True, slots=True)
class Between:
    """As many nodes as the queue asks for, within bounds."""

    least: int
    most: int


Size = PerHost | Between


def parse_size(text: str) -> Size:
    """`per-host`, `N` or `MIN..MAX`; InvalidInput otherwise."""
    if text == PER_HOST:
        return PerHost()
    least, dots, most = text.partition("..")
    try:
        size = Between(int(least), int(most if dots else least))
    except ValueError:
        raise InvalidInput(f"nodes: {text!r} is none of per-host, N, MIN..MAX") from None
    if not 0 <= size.least <= size.most:
        raise InvalidInput(f"nodes: {text!r} ends before it begins")
    return size


def nodes_wanted(size: Size, *, machines: int, unended: int, sessions_per_node: int) -> int:
    """How many nodes there should be now for `unended` sessions, queued or under way."""
    match size:
        case PerHost():
            return machines
        case Between(least, most):
            return min(most, max(least, -(-unended // sessions_per_node)))


@dataclass(slots=True)
class Patience:
    """Follows a number up at once, and down only when it has been lower for a while."""

    seconds: float
    _seen: deque[tuple[float, int]] = field(default_factory=deque)
    """Numbers and when they were seen, each larger than all that came after it."""

    def follow(self, now: float, number: int) -> int:
        """The largest number of the last `seconds`, this one included."""
        while self._seen and self._seen[-1][1] <= number:
            self._seen.pop()
        self._seen.append((now, number))
        while self._seen[0][0] < now - self.seconds:
            self._seen.popleft()
        return self._seen[0][1]
