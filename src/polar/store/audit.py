"""The audit log: who asked for what, and what became of it. Rows are only added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import insert, select

from polar.models.access import AuditEntry, AuditPage, Role
from polar.store.database import Database
from polar.store.sessions import page_start
from polar.store.tables import audit

LONGEST_DETAIL = 1_000


@dataclass(frozen=True, slots=True)
class Noted:
    """An entry about to be stored."""

    action: str
    status: int
    actor: str | None = None
    role: Role | None = None
    address: str | None = None
    object: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class AuditFilter:
    """Which entries are looked for; None: any."""

    actor: str | None = None
    action: str | None = None
    object: str | None = None
    since: float | None = None
    refused: bool = False
    """Only what was answered with an error."""


class Audit:
    """Appending to the log, and reading it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def append(self, noted: Sequence[Noted]) -> None:
        """Store entries; when this returns they are kept."""
        if not noted:
            return
        now = self._database.now()
        rows = [
            {
                **asdict(entry),
                "at": now,
                "role": None if entry.role is None else entry.role.value,
                "object": None if entry.object is None else entry.object[:256],
                "detail": None if entry.detail is None else entry.detail[:LONGEST_DETAIL],
            }
            for entry in noted
        ]
        await self._database.write(lambda connection: connection.execute(insert(audit), rows))

    async def page(
        self, wanted: AuditFilter = AuditFilter(), *, limit: int = 100, before: str | None = None
    ) -> AuditPage:
        """Entries, newest first."""
        query = select(audit).order_by(audit.c.seq.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(audit.c.seq < page_start(before))
        for column in (audit.c.actor, audit.c.action, audit.c.object):
            if (value := getattr(wanted, column.name)) is not None:
                query = query.where(column == value)
        if wanted.since is not None:
            query = query.where(audit.c.at >= wanted.since)
        if wanted.refused:
            query = query.where(audit.c.status >= 400)
        rows = await self._database.read(lambda connection: connection.execute(query).all())
        entries = tuple(AuditEntry.model_validate(dict(row._mapping)) for row in rows[:limit])
        return AuditPage(entries=entries, next=str(entries[-1].seq) if len(rows) > limit else None)
