"""Taking results from nodes: each exactly once, and only under the lease that is its session's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from polar.errors import Conflict, InvalidInput, NotFound, PolarError
from polar.models.session import FailureReason, LeaseKey, SessionResult, SessionStatus, StageEntry
from polar.store.events import Entry, record
from polar.store.leased import Retries, entries, fenced_off, is_held, is_newest, requeue, rows_of
from polar.store.sessions import HELD, Ending, cancel_rows, end, ended_by_server
from polar.store.tables import results, sessions, tasks


@dataclass(frozen=True, slots=True)
class Delivered:
    """A result as it came from a node."""

    session_id: str
    key: LeaseKey
    result: SessionResult
    entered: Sequence[StageEntry] = ()


def complete_rows(
    connection: Connection, delivered: Sequence[Delivered], now: float, retries: Retries
) -> list[bool | PolarError]:
    """For each: True if it is taken now, False if this very result was taken before, or what is wrong."""
    enough = _early_stops(connection, delivered)
    rows = {row.id: row for row in rows_of(connection, [item.session_id for item in delivered])}
    known = _stored(connection, delivered, rows)
    outcomes: list[bool | PolarError] = []
    endings: list[Ending] = []
    again: list[Delivered] = []
    entered: list[Entry] = []
    for item in delivered:
        outcome = _outcome(item, rows.get(item.session_id), known)
        if outcome is True:
            row = rows[item.session_id]
            known[item.session_id] = Ending(item.result, item.key.fencing_token)
            entered += entries(row, item.entered, now)
            if retries.allows(item.result, row.attempt):
                again.append(item)
            else:
                endings.append(known[item.session_id])
        outcomes.append(outcome)
    record(connection, entered)
    end(connection, endings, now)
    for item in again:
        _run_again(connection, rows[item.session_id], item.result, now, retries)
    for task_id in sorted({it.result.task_id for it in endings if it.result.is_usable} & enough.keys()):
        _stop_early(connection, task_id, enough[task_id], now)
    return outcomes


def _run_again(
    connection: Connection, row: Row[Any], result: SessionResult, now: float, retries: Retries
) -> None:
    """Queue a session whose attempt failed through no fault of its agent, unless nobody wants it any more."""
    if row.cancel_requested:
        end(connection, [ended_by_server(row, SessionStatus.CANCELLED, result.error or "cancelled")], now)
    else:
        requeue(connection, [row], now, result.error or "", pause=retries.pause(row.attempt))


def _outcome(item: Delivered, row: Row[Any] | None, known: Mapping[str, Ending]) -> bool | PolarError:
    if row is None:
        return NotFound(f"no session {item.session_id!r}")
    if not is_newest(row, item.key):
        return fenced_off(item.session_id)
    if (problem := _problem(row, item.result)) is not None:
        return problem
    stored = known.get(item.session_id)
    if stored is None and is_held(row, item.key):
        return True
    if _was_no_ending(row, stored, item.result):
        return False
    if stored is None:
        return fenced_off(item.session_id)
    if stored.result != item.result:
        return Conflict(f"session {item.session_id!r} already has another result")
    return False


def _was_no_ending(row: Row[Any], stored: Ending | None, result: SessionResult) -> bool:
    """Whether a result of the newest lease was taken and did not end the session, which is queued again, or
    was cancelled instead."""
    if result.failure is not FailureReason.INFRASTRUCTURE:
        return False
    if stored is None:
        return bool(row.status == SessionStatus.QUEUED)
    return stored.result.status is SessionStatus.CANCELLED


def _stored(
    connection: Connection, delivered: Sequence[Delivered], rows: Mapping[str, Row[Any]]
) -> dict[str, Ending]:
    """The results that some of these sessions have already."""
    ended = {item.session_id for item in delivered if item.session_id in rows} - {
        id for id, row in rows.items() if SessionStatus(row.status) in HELD
    }
    if not ended:
        return {}
    query = select(results.c.session_id, results.c.fencing_token, results.c.result)
    found = connection.execute(query.where(results.c.session_id.in_(ended)))
    return {id: Ending(SessionResult.model_validate_json(text), token) for id, token, text in found}


def _early_stops(connection: Connection, delivered: Sequence[Delivered]) -> dict[str, int]:
    """Of the tasks that may have enough now: how many samples are enough.

    Locked before their sessions, so that of two last results the later one counts both.
    """
    ids = {item.result.task_id for item in delivered if item.result.is_usable}
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
    is_open = sessions.c.status.in_([SessionStatus.QUEUED.value, *(status.value for status in HELD)])
    rest = select(sessions).where(sessions.c.task_id == task_id, is_open).order_by(sessions.c.seq)
    rows = connection.execute(rest.with_for_update(key_share=True)).all()
    cancel_rows(connection, rows, now, f"early_stop: {enough} samples are enough")


def _problem(row: Row[Any], result: SessionResult) -> PolarError | None:
    """What a result says that its session contradicts."""
    if result.session_id != row.id:
        return InvalidInput(f"result.session_id: must be {row.id!r}, as in the address")
    if not result.status.ended:
        return InvalidInput("result.status: must be completed, failed or cancelled")
    if result.failure is not None and result.status is not SessionStatus.FAILED:
        return InvalidInput("result.failure: only a failed session has one")
    if result.status is SessionStatus.COMPLETED and result.verdict is None:
        return InvalidInput("result.verdict: a completed session needs one")
    if (result.task_id, result.sample) != (row.task_id, row.sample):
        return InvalidInput(f"result: must name task {row.task_id!r} and sample {row.sample}")
    return None
