"""The last hour's results at a glance."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Case, Cast, ColumnElement, Connection, Integer, case, cast, func, select

from polar.models.dashboard import Minute
from polar.store.database import Database
from polar.store.tables import results

MINUTES = 60


class Overviews:
    """Counts that cost little, however many sessions there are."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def minutes(self) -> tuple[Minute, ...]:
        """What ended in each minute of the last hour, oldest first."""
        now = self._database.now()
        # Whole minutes by the clock: bars of a chart then stand still while it moves on.
        start = (now // 60 - MINUTES + 1) * 60
        return await self._database.read(lambda connection: _minutes(connection, start))


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
