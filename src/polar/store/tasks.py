"""Tasks as they are stored: submitted once, then read, listed and cancelled.

Tasks of one priority take turns in the queue. The sessions of a task are cut into pieces of SAMPLES_PER_TURN,
one per turn; the queue goes by turn, then by age. A new task begins at the turn that the queue has come to,
not at the first one: so a large task cannot hold up those that come after it, and a stream of new tasks
cannot hold up the rest of a large one. A group no larger than a turn runs in one piece. Branches, which are
added to a task later, wait as a new task does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, Row, and_, exists, func, insert, or_, select, update

from polar.errors import Conflict, NotFound
from polar.models.session import Origin, Progress, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import TaskPage, TaskView
from polar.store.database import Repository, batches, reads, writes
from polar.store.runs import run_ids
from polar.store.sessions import (
    IS_OPEN,
    cancel_rows,
    count_by_status,
    id_of_run,
    next_page,
    page_start,
    session_id,
)
from polar.store.tables import IS_QUEUED, results, sessions, tasks
from polar.store.webhooks import target_ids

SAMPLES_PER_TURN = 64
"""Larger than the groups that trainers use, small beside the sessions of a day."""


def digest(spec: TaskSpec, origin: Origin | None = None) -> str:
    """Equal for two ways of writing the same task: key order, defaults, a bare component name, its run.

    Defaults are left out, so that a field added later does not change the digest of older tasks.
    """
    document = spec.model_dump(mode="json", exclude_defaults=True, exclude={"run"})
    if origin is not None:
        document["origin"] = origin.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


class Tasks(Repository):
    """All tasks that were ever acknowledged."""

    async def submit(self, spec: TaskSpec, origin: Origin | None = None) -> tuple[TaskView, bool]:
        """Store a task with its sessions, all or nothing; False: the same task was there already.

        With an origin, its sessions begin with the answers recorded there.
        """
        ((view, is_new),) = await self.submit_all([spec], origin)
        return view, is_new

    async def submit_all(
        self, specs: Sequence[TaskSpec], origin: Origin | None = None
    ) -> list[tuple[TaskView, bool]]:
        """`submit` for several tasks in one transaction: a conflict of one stores none."""
        # Not in the transaction: it takes its time, and nobody else may write meanwhile.
        digests = [digest(spec, origin) for spec in specs]
        return await self._database.write(
            lambda connection: _submit(connection, specs, digests, origin, self._database.now())
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
        run: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> TaskPage:
        """Tasks in the order in which they were submitted."""
        query = select(tasks).where(tasks.c.seq > page_start(after)).order_by(tasks.c.seq).limit(limit + 1)
        if status is not None:
            query = query.where(has_status(status))
        if run is not None:
            query = query.where(tasks.c.run_id == id_of_run(run))
        rows = connection.execute(query).all()
        return TaskPage(tasks=tuple(_views(connection, rows[:limit])), next=next_page(rows, limit))

    @writes
    def cancel(self, connection: Connection, id: str) -> TaskView:
        """Cancel every session of the task that has not ended."""
        now = self._database.now()
        # Locked before its sessions, as everyone does who adds branches: none is added unseen.
        connection.execute(select(tasks.c.seq).where(tasks.c.id == id).with_for_update(key_share=True))
        query = select(sessions).where(sessions.c.task_id == id, IS_OPEN)
        rows = connection.execute(query.order_by(sessions.c.seq).with_for_update(key_share=True)).all()
        if cancel_rows(connection, rows, now):
            is_first = (tasks.c.id == id) & tasks.c.cancelled_at.is_(None)
            connection.execute(update(tasks).where(is_first).values(cancelled_at=now))
        return _get(connection, id)


def _submit(
    connection: Connection,
    specs: Sequence[TaskSpec],
    digests: Sequence[str],
    origin: Origin | None,
    now: float,
) -> list[tuple[TaskView, bool]]:
    known = _digests(connection, [spec.id for spec in specs])
    before = frozenset(known)
    new: list[tuple[TaskSpec, str]] = []
    for spec, its_digest in zip(specs, digests, strict=True):
        if spec.id not in known:
            new.append((spec, its_digest))
        if known.setdefault(spec.id, its_digest) != its_digest:
            raise Conflict(f"task {spec.id!r} exists with other content", hint="choose another id")
    _insert(connection, new, origin, now)
    views = {spec.id: _fresh(spec, now) for spec, _ in new}
    views |= {id: _get(connection, id) for id in before}
    return [(views[spec.id], spec.id not in before) for spec in specs]


def _digests(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for some in batches(ids):
        query = select(tasks.c.id, tasks.c.spec_digest).where(tasks.c.id.in_(some))
        found |= {row.id: row.spec_digest for row in connection.execute(query)}
    return found


def _insert(
    connection: Connection, new: Sequence[tuple[TaskSpec, str]], origin: Origin | None, now: float
) -> None:
    if not new:
        return
    of_run = run_ids(connection, {spec.named_run for spec, _ in new}, now)
    targets = target_ids(connection, sorted({spec.webhook.url for spec, _ in new if spec.webhook}))
    connection.execute(
        insert(tasks),
        [
            {
                "id": spec.id,
                "spec": spec.model_dump_json(),
                "spec_digest": its_digest,
                "run_id": of_run[spec.named_run.name],
                "early_stop": spec.early_stop,
                "branching": spec.branching.model_dump_json() if spec.branching else None,
                "webhook_id": targets[spec.webhook.url] if spec.webhook else None,
                "webhook_events": ",".join(spec.webhook.events) if spec.webhook else None,
                "harness": spec.harness.name,
                "priority": spec.priority,
                "runtime": spec.runtime.name,
                "created_at": now,
            }
            for spec, its_digest in new
        ],
    )
    turns: dict[Queue, int] = {}
    rows: list[dict[str, Any]] = []
    for spec, _ in new:
        queue = Queue(spec.runtime.name, spec.priority)
        if queue not in turns:
            turns[queue] = queue.turn(connection)
        whose = {
            "task_id": spec.id,
            "run_id": of_run[spec.named_run.name],
            "harness": spec.harness.name,
        }
        rows += queue.rows(whose, [origin] * spec.samples, now, first_turn=turns[queue])
    connection.execute(insert(sessions), rows)


class Queue(NamedTuple):
    """The sessions of one runtime and priority, which wait for each other."""

    runtime: str
    priority: int

    def turn(self, connection: Connection) -> int:
        """The turn that the queue has come to; one index lookup."""
        query = (
            select(sessions.c.turn)
            .where(IS_QUEUED, sessions.c.runtime == self.runtime, sessions.c.priority == self.priority)
            .order_by(sessions.c.turn)
            .limit(1)
        )
        return connection.execute(query).scalar_one_or_none() or 0

    def rows(
        self,
        whose: Mapping[str, Any],
        origins: Sequence[Origin | None],
        now: float,
        *,
        first_turn: int,
        first_sample: int = 0,
        request_id: str | None = None,
    ) -> list[dict[str, Any]]:
        """Sessions that begin to wait, one for each origin; `whose` are the columns of their task."""
        shared = {
            **whose,
            **self._asdict(),
            "status": SessionStatus.QUEUED,
            "attempt": 0,
            "fencing_token": 0,
            "progress": Progress().model_dump_json(),
            "cancel_requested": False,
            "request_id": request_id,
            "created_at": now,
            "updated_at": now,
        }
        return [
            {
                "id": session_id(whose["task_id"], first_sample + place),
                "sample": first_sample + place,
                "turn": first_turn + place // SAMPLES_PER_TURN,
                "origin": None if origin is None else origin.model_dump_json(),
                "origin_id": None if origin is None else origin.session_id,
                **shared,
            }
            for place, origin in enumerate(origins)
        ]


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
            step=row.step,
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
