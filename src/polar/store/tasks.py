"""Tasks as they are stored: submitted once, then read, listed and cancelled.

Tasks of one priority take turns in the queue. The sessions of a task are cut into pieces of SAMPLES_PER_TURN,
one per turn; the queue goes by turn, then by age. A new task begins at the turn that the queue has come to,
not at the first one: so a large task cannot hold up those that come after it, and a stream of new tasks
cannot hold up the rest of a large one. A group no larger than a turn runs in one piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, func, insert, or_, select, update

from polar.errors import Conflict, NotFound
from polar.models.session import Progress, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import TaskPage, TaskView
from polar.store.database import Repository, batches, reads, writes
from polar.store.sessions import IS_OPEN, cancel_rows, count_by_status, next_page, page_start, session_id
from polar.store.tables import IS_QUEUED, results, sessions, tasks
from polar.store.webhooks import target_ids

SAMPLES_PER_TURN = 64
"""Larger than the groups that trainers use, small beside the sessions of a day."""


def digest(spec: TaskSpec) -> str:
    """Equal for two ways of writing the same task: key order, defaults, a bare component name.

    Defaults are left out, so that a field added later does not change the digest of older tasks.
    """
    document = spec.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class Tasks(Repository):
    """All tasks that were ever acknowledged."""

    async def submit(self, spec: TaskSpec) -> tuple[TaskView, bool]:
        """Store a task with its sessions, all or nothing; False: the same task was there already."""
        ((view, is_new),) = await self.submit_all([spec])
        return view, is_new

    async def submit_all(self, specs: Sequence[TaskSpec]) -> list[tuple[TaskView, bool]]:
        """`submit` for several tasks in one transaction: a conflict of one stores none."""
        # Not in the transaction: it takes its time, and nobody else may write meanwhile.
        digests = [digest(spec) for spec in specs]
        return await self._database.write(
            lambda connection: _submit(connection, specs, digests, self._database.now())
        )

    @reads
    def get(self, connection: Connection, id: str) -> TaskView:
        """One task; NotFound if there is none."""
        return _get(connection, id)

    @reads
    def page(
        self,
        connection: Connection,
        *,
        status: TaskStatus | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> TaskPage:
        """Tasks in the order in which they were submitted."""
        query = select(tasks).where(tasks.c.seq > page_start(after)).order_by(tasks.c.seq).limit(limit + 1)
        if status is not None:
            query = query.where(has_status(status))
        rows = connection.execute(query).all()
        return TaskPage(tasks=tuple(_views(connection, rows[:limit])), next=next_page(rows, limit))

    @writes
    def cancel(self, connection: Connection, id: str) -> TaskView:
        """Cancel every session of the task that has not ended."""
        now = self._database.now()
        query = select(sessions).where(sessions.c.task_id == id, IS_OPEN)
        rows = connection.execute(query.order_by(sessions.c.seq).with_for_update(key_share=True)).all()
        if cancel_rows(connection, rows, now):
            is_first = (tasks.c.id == id) & tasks.c.cancelled_at.is_(None)
            connection.execute(update(tasks).where(is_first).values(cancelled_at=now))
        return _get(connection, id)


def _submit(
    connection: Connection, specs: Sequence[TaskSpec], digests: Sequence[str], now: float
) -> list[tuple[TaskView, bool]]:
    known = _digests(connection, [spec.id for spec in specs])
    before = frozenset(known)
    new: list[tuple[TaskSpec, str]] = []
    for spec, its_digest in zip(specs, digests, strict=True):
        if spec.id not in known:
            new.append((spec, its_digest))
        if known.setdefault(spec.id, its_digest) != its_digest:
            raise Conflict(f"task {spec.id!r} exists with other content", hint="choose another id")
    _insert(connection, new, now)
    views = {spec.id: _fresh(spec, now) for spec, _ in new}
    views |= {id: _get(connection, id) for id in before}
    return [(views[spec.id], spec.id not in before) for spec in specs]


def _digests(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for some in batches(ids):
        query = select(tasks.c.id, tasks.c.spec_digest).where(tasks.c.id.in_(some))
        found |= {row.id: row.spec_digest for row in connection.execute(query)}
    return found


def _insert(connection: Connection, new: Sequence[tuple[TaskSpec, str]], now: float) -> None:
    if not new:
        return
    targets = target_ids(connection, sorted({spec.webhook.url for spec, _ in new if spec.webhook}))
    connection.execute(
        insert(tasks),
        [
            {
                "id": spec.id,
                "spec": spec.model_dump_json(),
                "spec_digest": its_digest,
                "early_stop": spec.early_stop,
                "webhook_id": targets[spec.webhook.url] if spec.webhook else None,
                "webhook_events": ",".join(spec.webhook.events) if spec.webhook else None,
                "harness": spec.harness.name,
                **_queue(spec, now),
            }
            for spec, its_digest in new
        ],
    )
    blank = {
        "status": SessionStatus.QUEUED,
        "attempt": 0,
        "fencing_token": 0,
        "progress": Progress().model_dump_json(),
        "cancel_requested": False,
        "updated_at": now,
    }
    first: dict[tuple[str, int], int] = {}
    rows: list[dict[str, Any]] = []
    for spec, _ in new:
        queue = spec.runtime.name, spec.priority
        if queue not in first:
            first[queue] = _first_turn(connection, spec)
        shared = {"task_id": spec.id, **blank, **_queue(spec, now)}
        rows += (
            {
                "id": session_id(spec.id, sample),
                "sample": sample,
                "turn": first[queue] + sample // SAMPLES_PER_TURN,
                **shared,
            }
            for sample in range(spec.samples)
        )
    connection.execute(insert(sessions), rows)


def _first_turn(connection: Connection, spec: TaskSpec) -> int:
    """The turn that the task's queue has come to; one index lookup."""
    query = (
        select(sessions.c.turn)
        .where(IS_QUEUED, sessions.c.runtime == spec.runtime.name, sessions.c.priority == spec.priority)
        .order_by(sessions.c.turn)
        .limit(1)
    )
    return connection.execute(query).scalar_one_or_none() or 0


def _queue(spec: TaskSpec, now: float) -> dict[str, Any]:
    return {"priority": spec.priority, "runtime": spec.runtime.name, "created_at": now}


def _fresh(spec: TaskSpec, now: float) -> TaskView:
    queued = {SessionStatus.QUEUED: spec.samples}
    return TaskView(spec=spec, status=TaskStatus.QUEUED, created_at=now, sessions=queued)


def _get(connection: Connection, id: str) -> TaskView:
    row = connection.execute(select(tasks).where(tasks.c.id == id)).one_or_none()
    if row is None:
        raise NotFound(f"no task {id!r}", hint="`polar tasks` lists them")
    return _views(connection, [row])[0]


def _views(connection: Connection, rows: Sequence[Row[Any]]) -> list[TaskView]:
    ids = [row.id for row in rows]
    counts = count_by_status(connection, sessions.c.task_id, sessions.c.task_id.in_(ids))
    averaged = connection.execute(
        select(results.c.task_id, func.avg(results.c.reward))
        .where(results.c.task_id.in_(ids))
        .group_by(results.c.task_id)
    )
    rewards: dict[str, float | None] = {row[0]: row[1] for row in averaged}
    return [
        TaskView(
            spec=TaskSpec.model_validate_json(row.spec),
            status=status_of(counts[row.id], row.cancelled_at is not None),
            created_at=row.created_at,
            sessions=counts[row.id],
            mean_reward=rewards.get(row.id),
        )
        for row in rows
    ]


def status_of(counts: dict[SessionStatus, int], was_cancelled: bool) -> TaskStatus:
    """What a task's sessions make it."""
    if counts.keys() <= {SessionStatus.QUEUED}:
        return TaskStatus.QUEUED
    if not all(status.ended for status in counts):
        return TaskStatus.RUNNING
    if was_cancelled or counts.keys() == {SessionStatus.CANCELLED}:
        return TaskStatus.CANCELLED
    return TaskStatus.FINISHED


def has_status(status: TaskStatus) -> ColumnElement[bool]:
    """`status_of` as a condition on rows of `tasks`."""

    def some(*conditions: ColumnElement[bool]) -> ColumnElement[bool]:
        return exists().where(sessions.c.task_id == tasks.c.id, *conditions)

    begun = some(sessions.c.status != SessionStatus.QUEUED)
    is_open = some(IS_OPEN)
    uncancelled = some(sessions.c.status != SessionStatus.CANCELLED)
    cancelled = or_(tasks.c.cancelled_at.is_not(None), ~uncancelled)
    match status:
        case TaskStatus.QUEUED:
            return ~begun
        case TaskStatus.RUNNING:
            return and_(begun, is_open)
        case TaskStatus.CANCELLED:
            return and_(~is_open, cancelled)
        case TaskStatus.FINISHED:
            return and_(~is_open, ~cancelled)
