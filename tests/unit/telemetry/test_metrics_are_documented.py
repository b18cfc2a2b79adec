"""The tables in docs/observability.md name what is exported: every metric, its type and its labels."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from prometheus_client.metrics import MetricWrapperBase

import polar
from polar.config.settings import NodeSettings
from polar.engines.embedded.server import families as embedded_families
from polar.gateway.metrics import GatewayMetrics
from polar.node.pools import Pools
from polar.node.services import NodeMetrics
from polar.rollout.metrics import ServerMetrics
from polar.telemetry.readings import Readings, families

DOCS = Path(polar.__file__).parents[2] / "docs" / "observability.md"

Row = tuple[str, str, tuple[str, ...]]


def documented() -> set[Row]:
    rows = re.findall(r"^\| `(polar_\w+)` \| (\w+) \| (.*?) \|", DOCS.read_text(), re.MULTILINE)
    return {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def row(name: str, kind: str, labels: Iterable[str]) -> Row:
    return name + ("_total" if kind == "counter" else ""), kind, tuple(labels)


def of_registry(registry: Any) -> set[Row]:
    return {found for collector in registry._collector_to_names for found in of_collector(collector)}


def of_collector(collector: Any) -> set[Row]:
    # The labels of what was never counted: the library's public parts do not name them.
    if isinstance(collector, MetricWrapperBase):
        assert collector._type is not None
        return {row(collector._name, collector._type, collector._labelnames)}
    return {row(family.name, family.type, family._labelnames) for family in collector.collect()}


def exported() -> set[Row]:
    own = {
        row(family.name, family.type, ())
        for family in embedded_families(Readings(), policy_version=0, is_paused=False)
    }
    read = {row(family.name, family.type, ("engine",)) for family in families({"http://engine": Readings()})}
    names_read = {name for name, _, _ in read}
    return (
        of_registry(ServerMetrics(cast(Any, None)).registry)
        | of_registry(NodeMetrics(Pools(NodeSettings())).registry)
        | of_registry(GatewayMetrics(int, int, bool).registry)
        | read
        | {found for found in own if found[0] not in names_read}
    )


def test_the_tables_are_what_is_exported() -> None:
    assert documented() == exported()


def test_no_two_parts_of_a_page_have_a_family_in_common() -> None:
    names = [name for name, _, _ in exported()]
    assert len(names) == len(set(names))
