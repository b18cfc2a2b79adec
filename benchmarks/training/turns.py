"""How much faster merged traces train as sessions get longer: the same ones, cut after ever more calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.training.layouts import LAYOUTS, Layout, reduced
from benchmarks.training.speed import Measurement, measure
from polar.recordings.recording import Recording
from polar.training.settings import ModelSettings, Pack

CALLS = (5, 10, 25, 50, 100)
SHARED = Layout("per_request + tree packing", LAYOUTS[0].builder, Pack.TREE)
"""Whether packing alone finds what merging finds."""
ALL = (LAYOUTS[0], SHARED, *LAYOUTS[1:])


@dataclass(frozen=True, slots=True)
class Point:
    """The layouts on sessions of one length; the first is one trace a request."""

    calls: int
    measured: tuple[Measurement, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        return tuple(self.measured[0].seconds / one.seconds for one in self.measured)


def curve(
    recordings: Sequence[Recording],
    model: ModelSettings,
    budget: int,
    seconds: float,
    vocabulary: int | None = None,
    calls: Sequence[int] = CALLS,
) -> Iterator[Point]:
    """A point for each length that the sessions reach."""
    shortest = min(len(one.completions) for one in recordings)
    for count in (count for count in calls if count <= shortest):
        cut = [reduced(one, count, vocabulary) for one in recordings]
        yield Point(count, tuple(measure(layout, cut, model, budget, seconds) for layout in ALL))
