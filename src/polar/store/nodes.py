"""The nodes that have joined: how many sessions each takes, what it holds, and whether it is drained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, exists, insert, select, update

from polar.errors import NotFound
from polar.models.dashboard import NodeOverview
from polar.models.session import SessionStatus
from polar.store.database import Repository, reads, writes
from polar.store.policy import SILENT_SECONDS
from polar.store.sessions import count_by_status
from polar.store.tables import nodes, policy_nodes, sessions

FORGOTTEN_SECONDS = 3600.0
"""A node that has not been heard of for so long, and holds nothing, is no longer shown."""


_IS_LEASED = sessions.c.lease_expires_at.is_not(None)


class Nodes(Repository):
    """Each by its name. One that is drained stays so, also when it joins anew, until it is resumed."""

    @writes
    def join(
        self,
        connection: Connection,
        name: str,
        places: Mapping[SessionStatus, int],
        runtimes: Sequence[str] = (),
    ) -> bool:
        """Take down how many sessions each stage of a node takes, and in which runtimes; whether it is
        drained."""
        told = {"places": json.dumps(dict(places)), "runtimes": json.dumps(list(runtimes))}
        row = _row(connection, name)
        if row is None:
            connection.execute(insert(nodes).values(name=name, **told))
            return False
        connection.execute(update(nodes).where(nodes.c.name == name).values(**told, trouble=None))
        return row.drained_at is not None

    @reads
    def runtimes(self, connection: Connection) -> frozenset[str]:
        """Those that at least one node allows; none if no node has joined yet."""
        told = connection.execute(select(nodes.c.runtimes)).scalars()
        return frozenset(name for runtimes in told for name in json.loads(runtimes))

    @writes
    def drain(self, connection: Connection, name: str) -> NodeOverview:
        """Lease it nothing more; what it holds it finishes. NotFound if no such node has joined."""
        return self._set(connection, name, self._database.now())

    @writes
    def resume(self, connection: Connection, name: str) -> NodeOverview:
        """Lease it sessions again."""
        return self._set(connection, name, None)

    @reads
    def all(self, connection: Connection) -> tuple[NodeOverview, ...]:
        """Those that report or hold sessions, by name."""
        seen = policy_nodes.c.seen_at > self._database.now() - FORGOTTEN_SECONDS
        reports = {row.node: row for row in connection.execute(select(policy_nodes).where(seen))}
        held = count_by_status(connection, sessions.c.node, _IS_LEASED)
        shown = sorted(reports.keys() | held.keys())
        known = {row.name: row for row in connection.execute(select(nodes).where(nodes.c.name.in_(shown)))}
        return tuple(
            self._view(name, known.get(name), reports.get(name), held.get(name, {})) for name in shown
        )

    def _set(self, connection: Connection, name: str, drained_at: float | None) -> NodeOverview:
        row = _row(connection, name)
        if row is None:
            raise NotFound(f"no node {name!r} has joined", hint="`polar nodes` shows those there are")
        if (row.drained_at is None) != (drained_at is None):
            connection.execute(update(nodes).where(nodes.c.name == name).values(drained_at=drained_at))
            row = _row(connection, name)
        report = connection.execute(select(policy_nodes).where(policy_nodes.c.node == name)).one_or_none()
        held = count_by_status(connection, sessions.c.node, _IS_LEASED, sessions.c.node == name)
        return self._view(name, row, report, held.get(name, {}))

    def _view(
        self, name: str, row: Row[Any] | None, report: Row[Any] | None, held: Mapping[SessionStatus, int]
    ) -> NodeOverview:
        silent = max(self._database.now() - report.seen_at, 0.0) if report is not None else FORGOTTEN_SECONDS
        return NodeOverview(
            name=name,
            is_silent=silent > SILENT_SECONDS,
            is_draining=row is not None and row.drained_at is not None,
            trouble=row.trouble if row is not None else None,
            seconds_silent=silent,
            version=report.version if report is not None else 0,
            error=report.error if report is not None else None,
            sessions=dict(held),
            places=json.loads(row.places) if row is not None else {},
        )


def report_trouble(connection: Connection, name: str, trouble: str | None) -> None:
    """Take down why a node takes no more sessions, or that it does again."""
    is_news = nodes.c.trouble.is_distinct_from(trouble)
    connection.execute(update(nodes).where(nodes.c.name == name, is_news).values(trouble=trouble))


def is_drained(connection: Connection, name: str) -> bool:
    """Whether a node is to be leased nothing."""
    drained = exists().where(nodes.c.name == name, nodes.c.drained_at.is_not(None))
    return bool(connection.execute(select(drained)).scalar_one())


def _row(connection: Connection, name: str) -> Row[Any] | None:
    return connection.execute(select(nodes).where(nodes.c.name == name).with_for_update()).one_or_none()
