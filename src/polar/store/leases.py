"""Who may run a session: leases with an end, renewed by heartbeats and guarded by fencing tokens.

A fencing token rises with every lease of a session. Whatever a node delivers carries the token of
its lease and is taken only while that lease is the session's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, bindparam, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from polar.errors import Conflict, InvalidInput, NotFound
from polar.models.session import TRANSITIONS, Lease, Progress, SessionResult, SessionStatus
from polar.models.task import TaskSpec
from polar.models.views import HeartbeatAnswer, SessionBeat
from polar.store.database import Database
from polar.store.sessions import HELD, Ending, cancel_rows, end, ended_by_server
from polar.store.tables import IS_QUEUED, results, sessions, tasks

_BATCH = 500
"""Rows handled by one statement: well below every database's limit on parameters."""


@dataclass(frozen=True, slots=True)
class Expired:
    """What became of the sessions whose nodes fell silent."""

    requeued: int = 0
    ended: int = 0


class Leases:
    """The lease protocol over the sessions table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, node: str, *, limit: int, runtimes: Sequence[str], seconds: float
    ) -> tuple[Lease, ...]:
        """Lease up to `limit` waiting sessions to a node: highest priority first, then oldest."""
        expires_at = self._database.now() + seconds
        async with self._database.write() as connection:
            rows: list[Row[Any]] = []
            for runtime in sorted(set(runtimes)):
                queue = select(sessions).where(IS_QUEUED, sessions.c.runtime == runtime)
                queue = queue.order_by(sessions.c.priority.desc(), sessions.c.seq).limit(limit)
                rows += (await connection.execute(queue.with_for_update(skip_locked=True))).all()
            rows = sorted(rows, key=lambda row: (-row.priority, row.seq))[:limit]
            if not rows:
                return ()
            await connection.execute(
                update(sessions)
                .where(sessions.c.seq.in_([row.seq for row in rows]))
                .values(
                    status=SessionStatus.INIT.value,
                    attempt=sessions.c.attempt + 1,
                    fencing_token=sessions.c.fencing_token + 1,
                    node=node,
                    lease_expires_at=expires_at,
                    updated_at=self._database.now(),
                )
            )
            wanted = {row.task_id for row in rows}
            found = await connection.execute(select(tasks.c.id, tasks.c.spec).where(tasks.c.id.in_(wanted)))
            specs = {id: TaskSpec.model_validate_json(spec) for id, spec in found}
        return tuple(
            Lease(
                session_id=row.id,
                task=specs[row.task_id],
                sample=row.sample,
                attempt=row.attempt + 1,
                fencing_token=row.fencing_token + 1,
                expires_at=expires_at,
            )
            for row in rows
        )

    async def heartbeat(self, node: str, beats: Sequence[SessionBeat], *, seconds: float) -> HeartbeatAnswer:
        """Renew the leases a node still has, and take over what it says of those sessions."""
        now = self._database.now()
        beat_of = {beat.session_id: beat for beat in beats}
        renewals: list[dict[str, Any]] = []
        held: set[str] = set()
        cancel: set[str] = set()
        async with self._database.write() as connection:
            for row in await _rows(connection, list(beat_of)):
                beat = beat_of[row.id]
                if row.node != node or not _is_held(row, beat.fencing_token):
                    continue
                held.add(row.id)
                if row.cancel_requested:
                    cancel.add(row.id)
                renewals.append(
                    {
                        "row": row.seq,
                        "status": _furthest(SessionStatus(row.status), beat.status).value,
                        "progress": beat.progress.model_dump_json(),
                        "lease_expires_at": now + seconds,
                        "updated_at": now,
                    }
                )
            if renewals:
                await connection.execute(update(sessions).where(sessions.c.seq == bindparam("row")), renewals)
        return HeartbeatAnswer(
            cancel=tuple(id for id in beat_of if id in cancel),
            lost=tuple(id for id in beat_of if id not in held),
        )

    async def check(self, session_id: str, fencing_token: int) -> None:
        """Conflict unless this token's lease is the session's own."""
        async with self._database.read() as connection:
            row = await _row(connection, session_id)
        if not _is_held(row, fencing_token):
            raise _fenced_off(session_id)

    async def complete(self, session_id: str, fencing_token: int, result: SessionResult) -> bool:
        """Store a session's result exactly once; False: this very result was stored before."""
        async with self._database.write() as connection:
            row = await _row(connection, session_id)
            _check_result(row, result)
            if _is_held(row, fencing_token):
                await end(connection, [Ending(result, fencing_token)], self._database.now())
                return True
            query = select(results.c.fencing_token, results.c.result).where(
                results.c.session_id == session_id
            )
            stored = (await connection.execute(query)).one_or_none()
        if stored is None or stored.fencing_token != fencing_token:
            raise _fenced_off(session_id)
        if SessionResult.model_validate_json(stored.result) != result:
            raise Conflict(f"session {session_id!r} already has another result")
        return False

    async def release(self, session_id: str, fencing_token: int) -> None:
        """Put a session back into the queue as if it had not been leased; again: nothing happens."""
        async with self._database.write() as connection:
            row = await _row(connection, session_id)
            if row.fencing_token == fencing_token and row.status == SessionStatus.QUEUED:
                return
            if not _is_held(row, fencing_token):
                raise _fenced_off(session_id)
            now = self._database.now()
            await _requeue(connection, [row], now, attempts_given_back=1)
            if row.cancel_requested:
                await cancel_rows(connection, [await _row(connection, session_id)], now)

    async def expire(self, *, max_attempts: int) -> Expired:
        """Run again what silent nodes held, or end it where it was tried often enough or cancelled."""
        requeued = ended = 0
        while True:
            now = self._database.now()
            async with self._database.write() as connection:
                overdue = select(sessions).where(sessions.c.lease_expires_at <= now).limit(_BATCH)
                rows = (await connection.execute(overdue.with_for_update(skip_locked=True))).all()
                endings = [
                    ending for row in rows if (ending := _ending_of_silent(row, max_attempts)) is not None
                ]
                over = {ending.result.session_id for ending in endings}
                await end(connection, endings, now)
                await _requeue(connection, [row for row in rows if row.id not in over], now)
            ended += len(endings)
            requeued += len(rows) - len(endings)
            if len(rows) < _BATCH:
                return Expired(requeued=requeued, ended=ended)


async def _row(connection: AsyncConnection, session_id: str) -> Row[Any]:
    query = select(sessions).where(sessions.c.id == session_id).with_for_update()
    row = (await connection.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"no session {session_id!r}")
    return row


async def _rows(connection: AsyncConnection, ids: Sequence[str]) -> list[Row[Any]]:
    rows: list[Row[Any]] = []
    for start in range(0, len(ids), _BATCH):
        query = select(sessions).where(sessions.c.id.in_(ids[start : start + _BATCH])).with_for_update()
        rows += (await connection.execute(query)).all()
    return rows


async def _requeue(
    connection: AsyncConnection, rows: Sequence[Row[Any]], now: float, *, attempts_given_back: int = 0
) -> None:
    if not rows:
        return
    await connection.execute(
        update(sessions)
        .where(sessions.c.seq.in_([row.seq for row in rows]))
        .values(
            status=SessionStatus.QUEUED.value,
            attempt=sessions.c.attempt - attempts_given_back,
            node=None,
            lease_expires_at=None,
            progress=Progress().model_dump_json(),
            updated_at=now,
        )
    )


def _is_held(row: Row[Any], fencing_token: int) -> bool:
    return SessionStatus(row.status) in HELD and row.fencing_token == fencing_token


def _fenced_off(session_id: str) -> Conflict:
    return Conflict(f"session {session_id!r} is no longer leased under this fencing token")


def _furthest(stored: SessionStatus, reported: SessionStatus) -> SessionStatus:
    """Where a held session is: heartbeats may skip stages and may arrive late, so it only moves on."""
    stage = stored
    while stage is not reported:
        onward = TRANSITIONS[stage] & HELD
        if not onward:
            return stored
        (stage,) = onward
    return reported


def _check_result(row: Row[Any], result: SessionResult) -> None:
    if result.session_id != row.id:
        raise InvalidInput(f"result.session_id: must be {row.id!r}, as in the address")
    if not result.status.ended:
        raise InvalidInput("result.status: must be completed, failed or cancelled")
    if result.status is SessionStatus.COMPLETED and result.verdict is None:
        raise InvalidInput("result.verdict: a completed session needs one")
    if (result.task_id, result.sample) != (row.task_id, row.sample):
        raise InvalidInput(f"result: must name task {row.task_id!r} and sample {row.sample}")


def _ending_of_silent(row: Row[Any], max_attempts: int) -> Ending | None:
    """How a session whose node fell silent ends, or None if it is to run again."""
    if row.cancel_requested:
        return ended_by_server(row, SessionStatus.CANCELLED, f"cancelled; node {row.node!r} fell silent")
    if row.attempt < max_attempts:
        return None
    return ended_by_server(
        row,
        SessionStatus.FAILED,
        f"given up after {row.attempt} attempts: node {row.node!r} fell silent during the last",
    )
