"""Who may run a session: leases with an end, renewed by heartbeats and guarded by fencing tokens.

A fencing token rises with every lease of a session, and a random secret is known to the node that got the
lease alone. Whatever a node says of a session carries both, as its lease's key, and is taken only while that
lease is the session's own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, case, exists, select, update

from polar.errors import Conflict, NotFound
from polar.models.session import (
    Lease,
    LeaseKey,
    Progress,
    SessionResult,
    SessionStatus,
    StageEntry,
)
from polar.models.task import TaskSpec
from polar.models.views import HeartbeatAnswer, SessionBeat
from polar.store.database import BATCH, Repository, batches, reads, writes
from polar.store.feeds import event, record
from polar.store.nodes import is_drained, report_trouble
from polar.store.sessions import LEASED, cancel_rows, end, ended_by_server, origin_of
from polar.store.tables import IS_QUEUED, captures, sessions, tasks

_STAGES = tuple(SessionStatus)
"""In the order in which a session enters them."""

_HOLD = (sessions.c.id, sessions.c.status, sessions.c.fencing_token, sessions.c.lease_digest)
"""What tells whether a key is that of the lease which holds a session."""

CLOCK_SECONDS = 1.0
"""By how much the clocks of servers may differ without anyone noticing."""


CONTINUES = "continues from what earlier attempts captured"


@dataclass(frozen=True, slots=True)
class Expired:
    """What became of the sessions whose nodes fell silent."""

    requeued: int = 0
    ended: int = 0


def waiting(runtime: str, now: float, avoid: Sequence[str] = ()) -> Select[Any]:
    """The queue of a runtime in the order in which it is leased, without those that wait for a retry, and
    without the tasks that are to be avoided."""
    queue = select(sessions).where(IS_QUEUED, sessions.c.runtime == runtime, _is_due(now))
    if avoid:
        queue = queue.where(sessions.c.task_id.not_in(avoid))
    return queue.order_by(sessions.c.priority.desc(), sessions.c.turn, sessions.c.seq)


def _is_due(now: float) -> ColumnElement[bool]:
    """True of a waiting session whose pause after a failure is over, if it had one.

    One that was put back at a time still to come went by a clock that was set back since, and would wait for
    as much longer.
    """
    is_from_the_future = sessions.c.updated_at > now + CLOCK_SECONDS
    return sessions.c.not_before.is_(None) | (sessions.c.not_before <= now) | is_from_the_future


class LeaseStore(Repository):
    """The lease protocol over the sessions table."""

    @writes
    def claim(
        self,
        connection: Connection,
        node: str,
        *,
        limit: int,
        runtimes: Sequence[str],
        seconds: float,
        avoid: Sequence[str] = (),
    ) -> tuple[Lease, ...]:
        """Lease up to `limit` waiting sessions to a node: highest priority first, then by turn and age.

        Those of the tasks to `avoid` only where no others wait. A node that is drained gets none.
        """
        if is_drained(connection, node):
            return ()
        now, named = self._database.now(), sorted(set(runtimes))
        rows = _next(connection, limit, named, now, avoid)
        if not rows and avoid:
            rows = _next(connection, limit, named, now)
        return _claim(connection, node, rows, now, seconds)

    @writes
    def heartbeat(
        self,
        connection: Connection,
        node: str,
        beats: Sequence[SessionBeat],
        *,
        seconds: float,
        trouble: str | None = None,
    ) -> HeartbeatAnswer:
        """Renew the leases a node still has, and take over what it says of those sessions and of itself."""
        report_trouble(connection, node, trouble)
        return _renew(connection, node, beats, self._database.now(), seconds)

    @reads
    def find_leased(self, connection: Connection, keys: Sequence[tuple[str, LeaseKey]]) -> list[bool]:
        """Whether each session is leased under the key beside it; one may be named with several keys."""
        query = select(*_HOLD).where(sessions.c.id.in_({id for id, _ in keys}))
        rows = {row.id: row for row in connection.execute(query)}
        return [id in rows and is_held(rows[id], key) for id, key in keys]

    @writes
    def release(self, connection: Connection, session_id: str, key: LeaseKey) -> None:
        """Put a session back into the queue as if it had not been leased; again: nothing happens. What was
        captured is kept."""
        now, row = self._database.now(), _row(connection, session_id)
        if is_newest(row, key) and row.status == SessionStatus.QUEUED:
            return
        if not is_held(row, key):
            raise fenced_off(session_id)
        requeue(connection, [row], now, "given back by its node", attempts_given_back=1)
        if row.cancel_requested:
            cancel_rows(connection, [_row(connection, session_id)], now)

    async def expire(self, *, max_attempts: int, longest: float | None = None) -> Expired:
        """Run again what silent nodes held, or end it where it was tried often enough or cancelled.

        An attempt that added to the session's capture came to something, and is not counted.
        With `longest`, the seconds that a lease lasts, one that was given before the clock was set back
        ends no later than one given now.
        """
        if longest is not None:
            await self._shorten(longest)
        requeued = ended = 0
        while True:
            batch = await self._expire_batch(max_attempts)
            ended += batch.ended
            requeued += batch.requeued
            if batch.ended + batch.requeued < BATCH:
                return Expired(requeued=requeued, ended=ended)

    @writes
    def _shorten(self, connection: Connection, longest: float) -> None:
        latest = self._database.now() + longest
        too_long = sessions.c.lease_expires_at > latest + CLOCK_SECONDS
        connection.execute(update(sessions).where(too_long).values(lease_expires_at=latest))

    @writes
    def _expire_batch(self, connection: Connection, max_attempts: int) -> Expired:
        now = self._database.now()
        overdue = select(sessions).where(sessions.c.lease_expires_at <= now).limit(BATCH)
        rows = connection.execute(overdue.with_for_update(skip_locked=True, key_share=True)).all()
        grown = _grown(connection, rows)
        results = [(row, _result_of_silent(row, row.id in grown, max_attempts)) for row in rows]
        ended = [(row, result) for row, result in results if result is not None]
        requeued = [row for row, result in results if result is None]
        end(connection, ended, now)
        for has_grown in (False, True):
            some = [row for row in requeued if (row.id in grown) is has_grown]
            requeue(connection, some, now, "its node fell silent", attempts_given_back=int(has_grown))
        return Expired(requeued=len(requeued), ended=len(ended))


def rows_of(connection: Connection, ids: Sequence[str]) -> list[Row[Any]]:
    """The sessions of these ids that there are, locked."""
    rows: list[Row[Any]] = []
    for some in batches(ids):
        # Everyone locks in the same order, so that no two wait for each other.
        query = select(sessions).where(sessions.c.id.in_(some)).order_by(sessions.c.seq)
        rows += connection.execute(query.with_for_update(key_share=True)).all()
    return rows


def digest(secret: str) -> str:
    """What is stored of a lease's secret: whoever reads the database or a back-up cannot use it."""
    return hashlib.sha256(secret.encode()).hexdigest()


def is_newest(row: Any, key: LeaseKey) -> bool:
    """Whether this is the key of the last lease that the session was given, held or not."""
    if row.fencing_token != key.fencing_token or row.lease_digest is None:
        return False
    return hmac.compare_digest(row.lease_digest, digest(key.secret))


def is_held(row: Any, key: LeaseKey) -> bool:
    """Whether the lease with this key is the session's own."""
    return row.status in LEASED and is_newest(row, key)


def fenced_off(session_id: str) -> Conflict:
    return Conflict(f"session {session_id!r} is not leased under this key")


def entries(row: Row[Any], entered: Sequence[StageEntry], now: float) -> list[dict[str, Any]]:
    """The events of the stages that a node says its session has entered, without those it said before."""
    return [
        event(row, entry.status, now - entry.seconds_ago, node=row.node)
        for entry in entered
        if _STAGES.index(entry.status) > _STAGES.index(row.status)
    ]


def requeue(
    connection: Connection,
    rows: Sequence[Row[Any]],
    now: float,
    why: str,
    *,
    pause: float = 0.0,
    attempts_given_back: int = 0,
) -> None:
    """Put sessions back into the queue, to be leased once the pause is over."""
    if not rows:
        return
    connection.execute(
        update(sessions)
        .where(sessions.c.seq.in_([row.seq for row in rows]))
        .values(
            status=SessionStatus.QUEUED,
            attempt=sessions.c.attempt - attempts_given_back,
            node=None,
            lease_expires_at=None,
            not_before=now + pause if pause else None,
            # Its next attempt continues with what is kept.
            progress=case((sessions.c.has_capture, sessions.c.progress), else_=Progress().model_dump_json()),
            updated_at=now,
        )
    )
    record(connection, [event(row, SessionStatus.QUEUED, now, node=row.node, detail=why) for row in rows])


def _next(
    connection: Connection, limit: int, runtimes: Sequence[str], now: float, avoid: Sequence[str] = ()
) -> list[Row[Any]]:
    rows: list[Row[Any]] = []
    for runtime in runtimes:
        queue = waiting(runtime, now, avoid).limit(limit).with_for_update(skip_locked=True, key_share=True)
        rows += connection.execute(queue).all()
    return sorted(rows, key=lambda row: (-row.priority, row.turn, row.seq))[:limit]


def _claim(
    connection: Connection, node: str, rows: Sequence[Row[Any]], now: float, seconds: float
) -> tuple[Lease, ...]:
    if not rows:
        return ()
    # One for all that go to this node together: it tells nodes apart, and the token a session's leases.
    secret = secrets.token_urlsafe(32)
    connection.execute(
        update(sessions)
        .where(sessions.c.seq.in_([row.seq for row in rows]))
        .values(
            status=SessionStatus.INIT,
            attempt=sessions.c.attempt + 1,
            fencing_token=sessions.c.fencing_token + 1,
            lease_digest=digest(secret),
            node=node,
            lease_expires_at=now + seconds,
            not_before=None,
            updated_at=now,
        )
    )
    record(
        connection,
        [
            event(
                row,
                SessionStatus.INIT,
                now,
                attempt=row.attempt + 1,
                node=node,
                detail=CONTINUES if row.has_capture else None,
            )
            for row in rows
        ],
    )
    wanted = {row.task_id for row in rows}
    found = connection.execute(select(tasks.c.id, tasks.c.spec).where(tasks.c.id.in_(wanted)))
    specs = {id: TaskSpec.model_validate_json(spec) for id, spec in found}
    return tuple(
        Lease(
            session_id=row.id,
            task=specs[row.task_id],
            sample=row.sample,
            attempt=row.attempt + 1,
            key=LeaseKey(fencing_token=row.fencing_token + 1, secret=secret),
            expires_at=now + seconds,
            origin=origin_of(row),
            continues=row.has_capture,
        )
        for row in rows
    )


def _renew(
    connection: Connection, node: str, beats: Sequence[SessionBeat], now: float, seconds: float
) -> HeartbeatAnswer:
    beat_of = {beat.session_id: beat for beat in beats}
    unchanged: list[int] = []
    renewals: list[dict[str, Any]] = []
    entered: list[dict[str, Any]] = []
    held: set[str] = set()
    cancel: set[str] = set()
    renewed = {"lease_expires_at": now + seconds, "updated_at": now}
    for row in rows_of(connection, list(beat_of)):
        beat = beat_of[row.id]
        if row.node != node or not is_held(row, beat.key):
            continue
        held.add(row.id)
        if row.cancel_requested:
            cancel.add(row.id)
        status = _furthest(SessionStatus(row.status), beat.status)
        progress = _furthest_progress(row, beat.progress).model_dump_json()
        if (row.status, row.progress) == (status, progress):
            unchanged.append(row.seq)
        else:
            renewals.append({"row": row.seq, "status": status, "progress": progress, **renewed})
        entered += entries(row, beat.entered, now)
    for some in batches(unchanged):
        connection.execute(update(sessions).where(sessions.c.seq.in_(some)).values(renewed))
    if renewals:
        connection.execute(update(sessions).where(sessions.c.seq == bindparam("row")), renewals)
    record(connection, entered)
    return HeartbeatAnswer(
        cancel=tuple(id for id in beat_of if id in cancel),
        lost=tuple(id for id in beat_of if id not in held),
    )


def _row(connection: Connection, session_id: str) -> Row[Any]:
    for row in rows_of(connection, [session_id]):
        return row
    raise NotFound(f"no session {session_id!r}")


def _furthest(stored: SessionStatus, reported: SessionStatus) -> SessionStatus:
    """Where a held session is: heartbeats may skip stages and may arrive late, so it only moves on."""
    return max(stored, reported, key=_STAGES.index) if reported in LEASED else stored


def _furthest_progress(row: Row[Any], reported: Progress) -> Progress:
    """How far a held session is: while an attempt catches up, as far as those before it came."""
    stored = Progress.model_validate_json(row.progress)
    is_behind = row.has_capture and stored.sampled_tokens > reported.sampled_tokens
    return stored if is_behind else reported


def _grown(connection: Connection, rows: Sequence[Row[Any]]) -> set[str]:
    """Those of these sessions of which something was captured under their last lease."""
    last = (captures.c.session_id == sessions.c.id) & (captures.c.fencing_token == sessions.c.fencing_token)
    seqs = [row.seq for row in rows if row.has_capture]
    return set(
        connection.scalars(select(sessions.c.id).where(sessions.c.seq.in_(seqs), exists().where(last)))
    )


def _result_of_silent(row: Row[Any], has_grown: bool, max_attempts: int) -> SessionResult | None:
    """How a session whose node fell silent ends, or None if it is to run again."""
    if row.cancel_requested:
        return ended_by_server(row, SessionStatus.CANCELLED, f"cancelled; node {row.node!r} fell silent")
    if has_grown or row.attempt < max_attempts:
        return None
    return ended_by_server(
        row,
        SessionStatus.FAILED,
        f"given up after {row.attempt} attempts: node {row.node!r} fell silent during the last",
    )
