"""A page of metrics in Prometheus' text form, gathered from the parts of a process when it is asked for."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

from polar.errors import PolarError

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
PATH = "/metrics"

Part = Callable[[], Awaitable[Iterable[Metric]]]
"""Asks a part of the process for its families; it may look something up first."""


def of_registry(registry: CollectorRegistry) -> Part:
    async def families() -> Iterable[Metric]:
        return registry.collect()

    return families


class MetricsPage:
    """One a process that has a door; parts are added as they start, and no two have a family in common."""

    def __init__(self) -> None:
        process = CollectorRegistry()
        ProcessCollector(registry=process)
        self._parts: list[Part] = [of_registry(process)]

    def add(self, *parts: Part) -> None:
        self._parts.extend(parts)

    @contextmanager
    def showing(self, *parts: Part) -> Iterator[None]:
        """Parts that end before the process does."""
        self.add(*parts)
        try:
            yield
        finally:
            self._parts = [part for part in self._parts if part not in parts]

    async def text(self) -> bytes:
        return generate_latest(_Gathered([family async for family in self._families()]))

    async def _families(self) -> AsyncIterator[Metric]:
        for part in tuple(self._parts):
            try:
                found = await part()
            except PolarError as error:
                # The rest of a page is of use, the more so when something is wrong.
                log.warning("left out of the page of metrics: %s", error)
                continue
            for family in found:
                # When a child was made helps no one, and doubles the page.
                family.samples = [s for s in family.samples if not s.name.endswith("_created")]
                yield family


class _Gathered(CollectorRegistry):
    """Families that are collected already, in the shape that the text is made from."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
