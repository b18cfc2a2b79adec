"""The whole store at a glance: sessions by status, what each node holds, and the last hour's results."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import Case, Cast, ColumnElement, Connection, Integer, case, cast, func, select

from polar.models.dashboard import Minute, NodeOverview
from polar.models.session import SessionStatus
from polar.store.database import Database
from polar.store.policy import SILENT_SECONDS
from polar.store.tables import policy_nodes, results, sessions

MINUTES = 60
FORGOTTEN_SECONDS = 3600.0
"""A node that has not been heard of for so long, and holds nothing, is no longer shown."""


class Overviews:
    """Counts that cost little, however many sessions there are."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def nodes(self) -> tuple[NodeOverview, ...]:
        """Those that report or hold sessions, by name."""
        return await self._database.read(self._nodes)

    async def minutes(self) -> tuple[Minute, ...]:
        """What ended in each minute of the last hour, oldest first."""
        now = self._database.now()
        # Whole minutes by the clock: bars of a chart then stand still while it moves on.
        start = (now // 60 - MINUTES + 1) * 60
        return await self._database.read(lambda connection: _minutes(connection, start))

    def _nodes(self, connection: Connection) -> tuple[NodeOverview, ...]:
        now = self._database.now()
        held: dict[str, dict[SessionStatus, int]] = defaultdict(dict)
        query = (
            select(sessions.c.node, sessions.c.status, func.count())
            .where(sessions.c.lease_expires_at.is_not(None))
            .group_by(sessions.c.node, sessions.c.status)
        )
        for node, status, count in connection.execute(query):
            held[node][SessionStatus(status)] = count
        shown = policy_nodes.c.seen_at > now - FORGOTTEN_SECONDS
        rows = {row.node: row for row in connection.execute(select(policy_nodes).where(shown))}
        found = []
        for name in sorted(rows.keys() | held.keys()):
            row = rows.get(name)
            silent = max(now - row.seen_at, 0.0) if row is not None else FORGOTTEN_SECONDS
            found.append(
                NodeOverview(
                    name=name,
                    is_alive=silent <= SILENT_SECONDS,
                    seconds_silent=silent,
                    version=row.version if row is not None else 0,
                    error=row.error if row is not None else None,
                    sessions=held.get(name, {}),
                )
            )
        return tuple(found)


def _minutes(connection: Connection, start: float) -> tuple[Minute, ...]:
    minute = _whole(connection, (results.c.created_at - start) / 60).label("minute")
    query = (
        select(
            minute,
            func.count(),
            func.sum(_one_where(results.c.usable)),
            func.sum(results.c.sampled_tokens),
            func.sum(results.c.trainable_tokens),
            func.avg(results.c.reward),
        )
        .where(results.c.created_at >= start)
        .group_by(minute)
    )
    found = {int(row[0]): row for row in connection.execute(query)}
    return tuple(
        Minute(
            at=start + 60 * place,
            ended=row[1],
            usable=int(row[2]),
            sampled_tokens=int(row[3]),
            trainable_tokens=int(row[4]),
            mean_reward=row[5],
        )
        if (row := found.get(place)) is not None
        else Minute(at=start + 60 * place)
        for place in range(MINUTES)
    )


def _whole(connection: Connection, value: ColumnElement[Any]) -> Cast[int]:
    # PostgreSQL rounds where SQLite cuts off, and not every SQLite has a floor.
    return cast(func.floor(value) if connection.dialect.name == "postgresql" else value, Integer)


def _one_where(condition: ColumnElement[bool]) -> Case[int]:
    return case((condition, 1), else_=0)
