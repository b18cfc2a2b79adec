"""Runs a plan to its end: submits what is missing, keeps what comes, and goes on where it was stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import groupby
from pathlib import Path

from polar import __version__
from polar.app.datagen.place import Say, own_system
from polar.app.datagen.plan import PlannedTask as Submitted
from polar.client import AsyncClient
from polar.config.settings import Settings
from polar.errors import NotFound
from polar.evals.attempts import Attempt, attempt_of
from polar.evals.journal import Journal
from polar.evals.plan import Plan, PlannedCell, PlannedTask
from polar.evals.report import Cell, Report, TaskOutcome, cell_of
from polar.models.completion import Completion
from polar.models.session import SessionResult
from polar.recordings.recording import DamagedRecording, decode

log = logging.getLogger(__name__)

Ended = Callable[[Attempt], None]
"""Told of every attempt that is new."""

Server = Callable[[PlannedCell], AbstractAsyncContextManager[AsyncClient]]
"""Gives the client of a server that runs the cell's model, for as long as it is needed."""


async def carry_out(plan: Plan, journal: Journal, server: Server, ended: Ended) -> None:
    """Have every attempt of the plan in the journal."""
    for _, group in groupby(sorted(plan.cells, key=_model), key=_model):
        cells = tuple(group)
        tasks = [task for one in cells for task in one.tasks if not _is_done(task, journal)]
        if tasks:
            async with server(cells[0]) as client:
                await _roll_out(client, tasks, journal, ended)


def _model(cell: PlannedCell) -> str:
    return cell.model or ""


def _is_done(task: PlannedTask, journal: Journal) -> bool:
    return all((task.spec.id, sample) in journal for sample in range(task.spec.samples))


async def _roll_out(
    client: AsyncClient, tasks: Sequence[PlannedTask], journal: Journal, ended: Ended
) -> None:
    for task in tasks:
        # The same content under the same id: what an earlier run submitted is left as it is.
        await client.submit(task.spec)
    async for result in client.results([task.spec.id for task in tasks], follow=True):
        if (result.task_id, result.sample) in journal:
            continue
        attempt = attempt_of(result, await _completions(client, result))
        journal.append(attempt)
        ended(attempt)


async def _completions(client: AsyncClient, result: SessionResult) -> Iterable[Completion]:
    """The session's model calls; none where no sound recording is there, which costs only token counts."""
    if not result.has_recording:
        return ()
    try:
        data = await client.recording(result.session_id)
        return (await asyncio.to_thread(decode, data)).completions
    except (NotFound, DamagedRecording) as error:
        log.warning("session %s: its tokens are not counted: %s", result.session_id, error)
        return ()


def given_server(url: str, token: str | None) -> Server:
    """A server that is running already, whatever its model."""

    @asynccontextmanager
    async def connect(_cell: PlannedCell) -> AsyncIterator[AsyncClient]:
        async with AsyncClient(url, token) as client:
            await client.health()
            yield client

    return connect


def own_server(plan: Plan, settings: Mapping[str | None, Settings], say: Say) -> Server:
    """A whole system for each model, started when it is needed and ended with it."""

    @asynccontextmanager
    async def start(cell: PlannedCell) -> AsyncIterator[AsyncClient]:
        tasks = [task for one in plan.cells if one.model == cell.model for task in one.tasks]
        submitted = [Submitted(task.id, task.spec) for task in tasks]
        async with (
            own_system(settings[cell.model], submitted, say) as place,
            AsyncClient(place.url, place.token) as client,
        ):
            yield client

    return start


def report_of(plan: Plan, journal: Journal) -> Report:
    """The report of a plan whose attempts are all in the journal."""
    return Report(
        run=plan.run,
        created_at=time.time(),
        polar_version=__version__,
        samples=plan.samples,
        seed=plan.seed,
        threshold=plan.threshold,
        ks=plan.ks,
        cells=tuple(_cell(planned, plan, journal) for planned in plan.cells),
    )


def _cell(planned: PlannedCell, plan: Plan, journal: Journal) -> Cell:
    outcomes = [
        TaskOutcome(id=task.id, digest=task.digest, attempts=journal.of(task.spec.id))
        for task in planned.tasks
    ]
    served = sorted({attempt.model for task in outcomes for attempt in task.attempts if attempt.model})
    model = _model_name(planned.model) if planned.model else ", ".join(served) or "unknown"
    return cell_of(planned.taskset, planned.harness, model, outcomes, threshold=plan.threshold, ks=plan.ks)


def _model_name(given: str) -> str:
    """Of a directory its name alone: the rest of the path says nothing of the model."""
    path = Path(given)
    return path.resolve().name if path.is_dir() else given
