"""Runs as they are stored: the work that tasks belong to, with what its trainer reports of its steps."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import Connection, Row, bindparam, delete, func, insert, select, update

from polar.errors import Conflict, NotFound
from polar.models.component import view
from polar.models.dashboard import RunCurves
from polar.models.session import SessionStatus
from polar.models.task import UNNAMED_RUN, Run, RunKind
from polar.models.views import MOST_NUMBERS, RunPage, RunStart, RunStep, RunView
from polar.store.database import Repository, batches, reads, writes
from polar.store.sessions import next_page, page_start, whole
from polar.store.tables import results, run_steps, runs, sessions, tasks

POINTS = 500
"""How many steps curves have at most: more than a screen has columns for."""
SPANS = 60
"""How many spans of time a run's rewards are averaged over, at most."""
SCORED_PER_SPAN = 4
"""How many rewards a span has on average, at least: fewer would tell of single sessions."""


def run_ids(connection: Connection, wanted: Collection[Run], now: float) -> dict[str, int]:
    """The ids of runs by name, in the caller's transaction; new ones begin now.

    Conflict if a run of another kind has the name.
    """
    known = _named(connection, wanted)
    # The run of tasks that name none is of their kind, whoever begins it.
    kinds = {run.name: run.kind for run in wanted} | {UNNAMED_RUN.name: UNNAMED_RUN.kind}
    if new := sorted({run.name for run in wanted} - known.keys()):
        connection.execute(
            insert(runs), [{"name": name, "kind": kinds[name], "created_at": now} for name in new]
        )
        known = _named(connection, wanted)
    for run in wanted:
        if (kind := known[run.name].kind) != run.kind:
            raise Conflict(
                f"run {run.name!r} is of kind {kind} here, not {run.kind.value}", hint="choose another name"
            )
    return {name: row.id for name, row in known.items()}


def _named(connection: Connection, wanted: Collection[Run]) -> dict[str, Row[Any]]:
    names = sorted({run.name for run in wanted})
    found = [
        row
        for some in batches(names)
        for row in connection.execute(select(runs).where(runs.c.name.in_(some)))
    ]
    return {row.name: row for row in found}


class Runs(Repository):
    """All runs that ever had a task or a step."""

    @writes
    def begin(self, connection: Connection, name: str, start: RunStart) -> RunView:
        """Make a run if it is not there, and drop what was reported of steps that will be reported again."""
        run = Run(name=name, kind=start.kind)
        id = run_ids(connection, [run], self._database.now())[name]
        # 0 is also the step of what is measured before the first.
        last = start.step or -1
        connection.execute(delete(run_steps).where(run_steps.c.run_id == id, run_steps.c.step > last))
        learned = (tasks.c.run_id == id) & (tasks.c.step > last)
        connection.execute(update(tasks).where(learned).values(step=None))
        return _get(connection, name)

    @writes
    def report(self, connection: Connection, name: str, steps: Sequence[RunStep]) -> RunView:
        """Store steps with their numbers, and which tasks they learned from."""
        id, now = _row(connection, name).id, self._database.now()
        latest = {one.step: one for one in steps}
        for some in batches(list(latest)):
            connection.execute(delete(run_steps).where(run_steps.c.run_id == id, run_steps.c.step.in_(some)))
        connection.execute(
            insert(run_steps),
            [
                {"run_id": id, "step": step, "numbers": json.dumps(one.numbers), "created_at": now}
                for step, one in latest.items()
            ],
        )
        if learned := [{"task": task, "at": step} for step, one in latest.items() for task in one.tasks]:
            chosen = (tasks.c.id == bindparam("task")) & (tasks.c.run_id == id)
            connection.execute(update(tasks).where(chosen).values(step=bindparam("at")), learned)
        return _get(connection, name)

    @reads
    def get(self, connection: Connection, name: str) -> RunView:
        """One run; NotFound if there is none."""
        return _get(connection, name)

    @reads
    def page(
        self,
        connection: Connection,
        *,
        kind: RunKind | None = None,
        text: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> RunPage:
        """Runs, the newest first; `text` is a part of the name."""
        query = select(runs, runs.c.id.label("seq")).order_by(runs.c.id.desc()).limit(limit + 1)
        if kind is not None:
            query = query.where(runs.c.kind == kind)
        if text:
            query = query.where(runs.c.name.contains(text, autoescape=True))
        if after is not None:
            query = query.where(runs.c.id < page_start(after))
        rows = connection.execute(query).all()
        return RunPage(runs=_views(connection, rows[:limit]), next=next_page(rows, limit))

    @reads
    def curves(self, connection: Connection, name: str) -> RunCurves:
        """A run's numbers over its steps, of a long one every n-th and the last; its rewards over time.

        Where the names of numbers change from step to step, those of the last steps are kept.
        """
        row = _row(connection, name)
        of_run = run_steps.c.run_id == row.id
        every = select(run_steps.c.step).where(of_run).order_by(run_steps.c.step.desc())
        steps = connection.scalars(every).all()
        kept = steps[:: max(math.ceil(len(steps) / POINTS), 1)][::-1]
        numbers: dict[int, dict[str, float]] = {}
        for some in batches(kept):
            query = select(run_steps.c.step, run_steps.c.numbers).where(of_run, run_steps.c.step.in_(some))
            numbers |= {step: json.loads(text) for step, text in connection.execute(query)}
        names = islice(dict.fromkeys(key for step in reversed(kept) for key in numbers[step]), MOST_NUMBERS)
        hours, rewards = _rewards(connection, row)
        return RunCurves(
            run=_get(connection, name),
            steps=tuple(kept),
            series={key: tuple(numbers[step].get(key) for step in kept) for key in names},
            hours=hours,
            rewards=rewards,
        )


def _row(connection: Connection, name: str) -> Row[Any]:
    row = connection.execute(select(runs).where(runs.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"no run {name!r}", hint="`polar runs` lists them")
    return row


def _get(connection: Connection, name: str) -> RunView:
    return _views(connection, [_row(connection, name)])[0]


def _views(connection: Connection, rows: Sequence[Row[Any]]) -> tuple[RunView, ...]:
    counts: dict[int, dict[SessionStatus, int]] = defaultdict(dict)
    means: dict[int, float | None] = {}
    summed = (
        select(sessions.c.run_id, sessions.c.status, func.count(), func.avg(sessions.c.reward))
        .where(sessions.c.run_id.in_([row.id for row in rows]))
        .group_by(sessions.c.run_id, sessions.c.status)
    )
    for id, status, count, mean in connection.execute(summed):
        counts[id][SessionStatus(status)] = count
        if status == SessionStatus.COMPLETED:
            means[id] = mean
    return tuple(
        view(
            RunView, row, sessions=counts[row.id], mean_reward=means.get(row.id), **_progress(connection, row)
        )
        for row in rows
    )


def _progress(connection: Connection, run: Row[Any]) -> dict[str, Any]:
    """How many tasks there are, what the trainer reported last, and when something came last."""
    counted = select(func.count()).select_from(tasks).where(tasks.c.run_id == run.id)
    query = select(run_steps).where(run_steps.c.run_id == run.id).order_by(run_steps.c.step.desc()).limit(1)
    last = connection.execute(query).one_or_none()
    ended = connection.scalar(select(func.max(results.c.created_at)).where(results.c.run_id == run.id))
    times = (run.created_at, ended, last and last.created_at)
    return {
        "tasks": connection.scalar(counted),
        "updated_at": max(at for at in times if at is not None),
        "step": last and last.step,
        "latest": json.loads(last.numbers) if last else {},
    }


def _rewards(connection: Connection, run: Row[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Hours since a run began, and the mean reward of what completed up to each since the one before."""
    at, scored = results.c.created_at, (results.c.run_id == run.id) & results.c.reward.is_not(None)
    first, last, count = connection.execute(
        select(func.min(at), func.max(at), func.count()).where(scored)
    ).one()
    if not count:
        return (), ()
    spans = max(min(count // SCORED_PER_SPAN, SPANS), 1)
    width = (last - first) / spans or 1.0
    span = whole(connection, (at - first) / width).label("span")
    averaged = select(span, func.count(), func.avg(results.c.reward)).where(scored).group_by("span")
    counts: dict[int, int] = defaultdict(int)
    sums: dict[int, float] = defaultdict(float)
    for place, count, mean in connection.execute(averaged):
        # The last of all ends the last span, and begins none.
        counts[min(place, spans - 1)] += count
        sums[min(place, spans - 1)] += count * mean
    hours = tuple((first + width * (place + 1) - run.created_at) / 3600 for place in sorted(counts))
    return hours, tuple(sums[place] / counts[place] for place in sorted(counts))
