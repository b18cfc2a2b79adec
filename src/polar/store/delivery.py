"""Taking results from nodes: each exactly once, and only under the lease that is its session's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from polar.errors import Conflict, InvalidInput, NotFound, PolarError
from polar.models.delivery import Delivery
from polar.models.session import FailureReason, SessionResult, SessionStatus
from polar.store.feeds import record
from polar.store.leases import entries, fenced_off, is_held, is_newest, requeue, rows_of
from polar.store.sessions import IS_OPEN, LEASED, cancel_rows, end, ended_by_server
from polar.store.tables import results, sessions, tasks

LONGEST_PAUSE_SECONDS = 300.0
"""However often a session has failed, it is not kept back for longer."""


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
    enough = _early_stops(connection, deliveries)
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
    end(connection, ended, now)
    for row, result in failed:
        _run_again(connection, row, result, now, retries)
    for task_id in sorted({result.task_id for _, result in ended if result.is_usable} & enough.keys()):
        _stop_early(connection, task_id, enough[task_id], now)
    return outcomes


def _run_again(
    connection: Connection, row: Row[Any], result: SessionResult, now: float, retries: Retries
) -> None:
    """Queue a session whose attempt failed through no fault of its agent, unless it is no longer wanted."""
    if row.cancel_requested:
        cancelled = ended_by_server(row, SessionStatus.CANCELLED, result.error or "cancelled")
        end(connection, [(row, cancelled)], now)
    else:
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


def _early_stops(connection: Connection, deliveries: Sequence[Delivery]) -> dict[str, int]:
    """Of the tasks that may have enough now: how many samples are enough.

    Locked before their sessions, so that of two last results the later one counts both.
    """
    ids = {delivery.result.task_id for delivery in deliveries if delivery.result.is_usable}
    if not ids:
        return {}
    query = select(tasks.c.id, tasks.c.early_stop).where(tasks.c.id.in_(ids), tasks.c.early_stop.is_not(None))
    found = connection.execute(query.order_by(tasks.c.seq).with_for_update(key_share=True))
    return {row.id: row.early_stop for row in found}


def _stop_early(connection: Connection, task_id: str, enough: int, now: float) -> None:
    """Cancel what is left of a task that has as many usable samples as it asked for."""
    counted = select(func.count()).where(results.c.task_id == task_id, results.c.usable)
    if connection.execute(counted).scalar_one() < enough:
        return
    rest = select(sessions).where(sessions.c.task_id == task_id, IS_OPEN).order_by(sessions.c.seq)
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
