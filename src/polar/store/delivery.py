"""Storing what nodes send: what their sessions capture, and results. Each is stored once, and only under the
lease that is its session's own.

What running sessions capture is kept as it grows, for their next attempt, until they end. Each answer of the
model is sent once, under the lease that it was sampled under: an attempt that continues an earlier one sends
only what is new. So what all leases of a session have sent is together one capture, and an attempt that is
lost takes nothing with it that was stored before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, tuple_, update

from polar.errors import Conflict, InvalidInput, NotFound, PolarError
from polar.models.delivery import CaptureGrowth, Delivery
from polar.models.session import FailureReason, SessionResult, SessionStatus
from polar.store.branches import branch_out, lock_tasks
from polar.store.database import Repository, batches, reads, writes
from polar.store.feeds import record
from polar.store.leases import entries, fenced_off, is_held, is_newest, requeue, rows_of
from polar.store.sessions import IS_OPEN, LEASED, cancel_rows, drop_captures, end, ended_by_server
from polar.store.tables import captures, results, sessions, tasks

LONGEST_PAUSE_SECONDS = 300.0
"""However often a session has failed, it is not kept back for longer."""
_READ_TOGETHER = 64
"""Pieces that are in memory at once when a capture is read."""


@dataclass(frozen=True, slots=True)
class Retries:
    """When a session is run again whose infrastructure failed."""

    max_attempts: int = 3
    """How often it is begun in all."""
    seconds: float = 5.0
    """How long it waits after its first attempt; twice as long after each further one."""

    def allows(self, result: SessionResult, attempt: int) -> bool:
        """Whether another attempt follows the one that came to this result."""
        return result.failure is FailureReason.INFRASTRUCTURE and attempt < self.max_attempts

    def pause(self, attempt: int) -> float:
        """The backoff after an attempt, counted from 1."""
        return float(min(self.seconds * 2.0 ** (attempt - 1), LONGEST_PAUSE_SECONDS))


def complete_rows(
    connection: Connection, deliveries: Sequence[Delivery], now: float, retries: Retries
) -> list[bool | PolarError]:
    """For each: True if it is taken now, False if this very result was taken before, or what is wrong."""
    changed = _lock_changed_tasks(connection, deliveries)
    rows = {row.id: row for row in rows_of(connection, [delivery.session_id for delivery in deliveries])}
    known = _stored(connection, rows)
    outcomes: list[bool | PolarError] = []
    ended: list[tuple[Row[Any], SessionResult]] = []
    failed: list[tuple[Row[Any], SessionResult]] = []
    entered: list[dict[str, Any]] = []
    for delivery in deliveries:
        row, result = rows.get(delivery.session_id), delivery.result
        outcome = _outcome(delivery, row, known)
        if outcome is True and row is not None:
            known[row.id] = result
            entered += entries(row, delivery.entered, now)
            (failed if retries.allows(result, row.attempt) else ended).append((row, result))
        outcomes.append(outcome)
    record(connection, entered)
    end(connection, ended, now, _branch_out(connection, changed, ended, now))
    for row, result in failed:
        _run_again(connection, row, result, now, retries)
    for task_id in sorted({result.task_id for _, result in ended if result.is_usable} & changed.keys()):
        if (enough := changed[task_id].early_stop) is not None:
            _stop_early(connection, task_id, enough, now)
    return outcomes


def _run_again(
    connection: Connection, row: Row[Any], result: SessionResult, now: float, retries: Retries
) -> None:
    """Queue a session whose attempt failed through no fault of its agent, unless it is no longer wanted.

    It begins anew: what failed after the same answers of the model could fail again.
    """
    if row.cancel_requested:
        cancelled = ended_by_server(row, SessionStatus.CANCELLED, result.error or "cancelled")
        end(connection, [(row, cancelled)], now)
    else:
        drop_captures(connection, [row])
        requeue(connection, [row], now, result.error or "", pause=retries.pause(row.attempt))


def _outcome(
    delivery: Delivery, row: Row[Any] | None, known: Mapping[str, SessionResult]
) -> bool | PolarError:
    if row is None:
        return NotFound(f"no session {delivery.session_id!r}")
    if not is_newest(row, delivery.key):
        return fenced_off(row.id)
    if (problem := _problem(row, delivery.result)) is not None:
        return problem
    stored = known.get(row.id)
    if stored is None and is_held(row, delivery.key):
        return True
    if _was_no_ending(row, stored, delivery.result):
        return False
    if stored is None:
        return fenced_off(row.id)
    if stored != delivery.result:
        return Conflict(f"session {row.id!r} already has another result")
    return False


def _was_no_ending(row: Row[Any], stored: SessionResult | None, result: SessionResult) -> bool:
    """Whether a result of the newest lease was taken and did not end the session, which is queued again, or
    was cancelled instead."""
    if result.failure is not FailureReason.INFRASTRUCTURE:
        return False
    if stored is None:
        return bool(row.status == SessionStatus.QUEUED)
    return stored.status is SessionStatus.CANCELLED


def _stored(connection: Connection, rows: Mapping[str, Row[Any]]) -> dict[str, SessionResult]:
    """The results that some of these sessions have already."""
    ended = [id for id, row in rows.items() if row.status not in LEASED]
    if not ended:
        return {}
    query = select(results.c.session_id, results.c.result).where(results.c.session_id.in_(ended))
    return {id: SessionResult.model_validate_json(text) for id, text in connection.execute(query)}


def _lock_changed_tasks(connection: Connection, deliveries: Sequence[Delivery]) -> dict[str, Row[Any]]:
    """The tasks that may have enough samples now, or get branches.

    Locked before their sessions, so that of two last results the later one counts both.
    """
    delivered = [delivery.result for delivery in deliveries]
    usable = {result.task_id for result in delivered if result.is_usable}
    branching = {result.task_id for result in delivered if result.branch_at}
    if not usable and not branching:
        return {}
    may_stop = tasks.c.id.in_(usable) & tasks.c.early_stop.is_not(None)
    may_branch = tasks.c.id.in_(branching) & tasks.c.branching.is_not(None)
    return {row.id: row for row in lock_tasks(connection, may_stop | may_branch)}


def _branch_out(
    connection: Connection,
    changed: Mapping[str, Row[Any]],
    ended: Sequence[tuple[Row[Any], SessionResult]],
    now: float,
) -> dict[str, str]:
    """Add the branches of sessions that have completed; which of them were left out, by session."""
    left_out = {
        row.id: branch_out(connection, changed[row.task_id], row, result, now)
        for row, result in ended
        if row.task_id in changed
    }
    return {id: said for id, said in left_out.items() if said is not None}


def _stop_early(connection: Connection, task_id: str, enough: int, now: float) -> None:
    """Cancel the samples that are left of a task which has as many usable ones as it asked for.

    Branches are no samples: those of the samples that it has are still wanted.
    """
    is_sample = (sessions.c.task_id == task_id) & sessions.c.origin_id.is_(None)
    ended = results.join(sessions, sessions.c.id == results.c.session_id)
    counted = select(func.count()).select_from(ended).where(is_sample, results.c.usable)
    if connection.execute(counted).scalar_one() < enough:
        return
    rest = select(sessions).where(is_sample, IS_OPEN).order_by(sessions.c.seq)
    rows = connection.execute(rest.with_for_update(key_share=True)).all()
    cancel_rows(connection, rows, now, f"early_stop: {enough} samples are enough")


def _problem(row: Row[Any], result: SessionResult) -> PolarError | None:
    """What a result says that its session contradicts."""
    if not result.status.ended:
        return InvalidInput("result.status: must be completed, failed or cancelled")
    if result.failure is not None and result.status is not SessionStatus.FAILED:
        return InvalidInput("result.failure: only a failed session has one")
    if result.status is SessionStatus.COMPLETED and result.verdict is None:
        return InvalidInput("result.verdict: a completed session needs one")
    if (result.task_id, result.sample) != (row.task_id, row.sample):
        return InvalidInput(f"result: must name task {row.task_id!r} and sample {row.sample}")
    return None


class Captures(Repository):
    """What is kept of sessions that have not ended."""

    @writes
    def append(
        self, connection: Connection, grown: Sequence[CaptureGrowth], *, most_bytes: int
    ) -> list[int | None]:
        """Keep what captures have grown by, under the leases that are their sessions' own.

        For each, how many bytes are stored of what its lease has sent. None: no more of it is taken, since
        the lease has passed on or the session would have more than `most_bytes`. What is stored already
        changes nothing, and nothing is stored behind a gap.
        """
        rows = {row.id: row for row in rows_of(connection, [one.session_id for one in grown])}
        stored = _lengths(connection, rows)
        new: list[dict[str, Any]] = []
        answers: list[int | None] = []
        for one in grown:
            row, lengths, token = rows.get(one.session_id), stored[one.session_id], one.key.fencing_token
            length = lengths[token]
            data = one.data[length - one.offset :] if one.offset <= length else b""
            if row is None or not is_held(row, one.key) or sum(lengths.values()) + len(data) > most_bytes:
                answers.append(None)
                continue
            if data:
                length = lengths[token] = length + len(data)
                key = {"session_id": row.id, "fencing_token": token, "length": length}
                new.append({**key, "data": data})
            answers.append(length)
        _insert(connection, new, rows.values())
        return answers

    @reads
    def size(self, connection: Connection) -> int:
        """How many bytes are kept of all sessions; read from an index alone."""
        lease = captures.c.session_id, captures.c.fencing_token
        longest = select(func.max(captures.c.length).label("length")).group_by(*lease).subquery()
        return int(connection.scalar(select(func.sum(longest.c.length))) or 0)

    async def read(self, session_id: str) -> AsyncIterator[bytes]:
        """All that is kept of a session, piece by piece."""
        token = length = 0
        while pieces := await self.after(session_id, token, length):
            for _, _, data in pieces:
                yield data
            token, length, _ = pieces[-1]

    @reads
    def after(
        self, connection: Connection, session_id: str, token: int, length: int
    ) -> list[tuple[int, int, bytes]]:
        """The next pieces of what is kept of a session after this fencing token and length, each with its own
        two; none at the end."""
        place = captures.c.fencing_token, captures.c.length
        is_next = (captures.c.session_id == session_id) & (tuple_(*place) > tuple_(token, length))
        query = select(*place, captures.c.data).where(is_next).order_by(*place).limit(_READ_TOGETHER)
        return [tuple(row) for row in connection.execute(query)]


def _lengths(connection: Connection, ids: Collection[str]) -> defaultdict[str, defaultdict[int, int]]:
    """Session → fencing token → how many bytes are stored."""
    found: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    key = captures.c.session_id, captures.c.fencing_token
    for some in batches(list(ids)):
        query = select(*key, func.max(captures.c.length)).where(captures.c.session_id.in_(some))
        for id, token, length in connection.execute(query.group_by(*key)):
            found[id][token] = length
    return found


def _insert(connection: Connection, new: Sequence[dict[str, Any]], rows: Collection[Row[Any]]) -> None:
    if not new:
        return
    connection.execute(insert(captures), new)
    ids = {piece["session_id"] for piece in new}
    if first := [row.seq for row in rows if row.id in ids and not row.has_capture]:
        connection.execute(update(sessions).where(sessions.c.seq.in_(first)).values(has_capture=True))
