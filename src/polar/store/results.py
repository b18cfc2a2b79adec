"""The feed of results, in the order they were stored."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, select

from polar.models.session import SessionResult
from polar.models.views import ResultPage
from polar.store.database import Database
from polar.store.feed import Feed, horizon
from polar.store.tables import results


class Results:
    """What came of every ended session."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def after(
        self, cursor: int, *, limit: int = 100, task_ids: Collection[str] | None = None
    ) -> ResultPage:
        """The results stored after `cursor`; None: of all tasks."""
        query = select(results.c.seq, results.c.result).where(results.c.seq > cursor)
        if task_ids is not None:
            query = query.where(results.c.task_id.in_(task_ids))
        query = query.order_by(results.c.seq).limit(limit)

        def look(connection: Connection) -> Sequence[Any]:
            end = horizon(connection, Feed.RESULTS)
            return connection.execute(query if end is None else query.where(results.c.seq <= end)).all()

        rows = await self._database.read(look)
        return ResultPage(
            results=tuple(SessionResult.model_validate_json(row.result) for row in rows),
            cursor=rows[-1].seq if rows else cursor,
        )

    async def is_end(self, cursor: int, *, task_ids: Collection[str] | None = None) -> bool:
        """Whether nothing is stored after `cursor`, not even what `after` may not show yet."""
        query = select(results.c.seq).where(results.c.seq > cursor).limit(1)
        if task_ids is not None:
            query = query.where(results.c.task_id.in_(task_ids))
        return await self._database.read(lambda connection: connection.execute(query).first()) is None

    async def fencing_token(self, session_id: str) -> int | None:
        """The token under which a session's result was stored, None while there is none."""
        query = select(results.c.fencing_token).where(results.c.session_id == session_id)
        return await self._database.read(lambda connection: connection.execute(query).scalar_one_or_none())
