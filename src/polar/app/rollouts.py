"""The one way to roll out tasks: submit them, follow results, retry failures, read recordings."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Container, Sequence
from dataclasses import dataclass
from functools import partial

import orjson

from polar import errors
from polar.client import AsyncClient
from polar.errors import NotFound, PolarError, Unavailable, retry_async
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import MAX_ID, Run, TaskSpec
from polar.recordings.recording import DamagedRecording, Recording, decode
from polar.trajectory.learnable import EndedSession

log = logging.getLogger(__name__)

MOST_TASKS_AT_ONCE = 64
"""A limit, since each task in flight is followed on its own connection."""
DOWNLOADS = 8
"""The number of recordings read at once."""
_LONGEST_NAME = 80
_DIGEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut(EndedSession):
    """An ended session of `roll_out`."""

    task: TaskSpec
    """The task as submitted at first; the result of a retry names another one."""
    was_found: bool
    """Whether it had ended before this call."""
    retries: int
    """How often this call retried its sample."""


OnEnded = Callable[[RolledOut], None]


def with_stable_id(task: TaskSpec, run: str = "") -> TaskSpec:
    """Give a task an id derived from its content and `run`, so that finished work is found again."""
    document = task.model_dump(mode="json", exclude_defaults=True, exclude={"run"})
    content = orjson.dumps([run, document], option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST]
    return task.model_copy(update={"id": f"{task.id[:_LONGEST_NAME]}-{digest}"})


def retry_of(task: TaskSpec, sample: int, number: int) -> TaskSpec:
    """Return a task of one sample without branches, with the seed it had in its own task."""
    sampling = task.sampling
    if sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sampling.seed + sample})
    changes = {"samples": 1, "early_stop": None, "branching": None, "sampling": sampling}
    return task.model_copy(update={**changes, "id": f"{task.id}-retry{number}-{sample}"})


def may_be_retried(task: TaskSpec, result: SessionResult) -> bool:
    """Whether this is the result of a sample that failed."""
    return result.status is SessionStatus.FAILED and result.sample < task.samples


def training_task(task: TaskSpec, prefix: str, samples: int, temperature: float) -> TaskSpec:
    """Give a task an id of its own, and sampling from the whole distribution, as trainers need."""
    sampling = task.sampling.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})
    changes = {"samples": samples, "sampling": sampling, "early_stop": None}
    return task.model_copy(update={"id": f"{prefix}-{task.id}"[:MAX_ID], **changes})


async def roll_out(
    client: AsyncClient,
    tasks: Sequence[TaskSpec],
    ended: OnEnded,
    *,
    run: Run,
    concurrency: int | None = None,
    retries: int = 0,
    skip: Container[tuple[str, int]] = (),
    with_recordings: bool = True,
) -> None:
    """Run every session of every task, samples and branches, as parts of `run`, and pass each result to
    `ended` once.

    Tasks that the server already has under their id are not run again: their results are found. An
    unreachable server is waited for. `concurrency` limits the tasks in flight; None submits all of them. A
    failed sample is retried `retries` times; a failed branch is not, since its beginning is in another
    session. Sessions in `skip`, by task and number, are left out.
    """
    downloads = asyncio.Semaphore(DOWNLOADS)
    tasks = [task.model_copy(update={"run": run}) for task in tasks]

    async def finish(task: TaskSpec, result: SessionResult, was_found: bool) -> None:
        result, was_found, tried = await _retried(client, task, result, was_found, retries)
        recording = None
        if with_recordings:
            async with downloads:
                recording = await read_recording(client, result)
        ended(RolledOut(result, recording, task=task, was_found=was_found, retries=tried))

    async def roll_out_batch(group: asyncio.TaskGroup, batch: Sequence[TaskSpec]) -> None:
        by_id = {task.id: task for task in batch}
        async for result, was_found in ended_sessions(client, batch):
            if (result.task_id, result.sample) not in skip:
                group.create_task(finish(by_id[result.task_id], result, was_found))

    async def work() -> None:
        for batch in batches:
            async with asyncio.TaskGroup() as group:
                await roll_out_batch(group, batch)

    batches = iter([tasks] if concurrency is None else [[task] for task in tasks])
    workers = 1 if concurrency is None else min(concurrency, MOST_TASKS_AT_ONCE, len(tasks))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
    except ExceptionGroup as group_error:
        raise _first(group_error) from None


async def _retried(
    client: AsyncClient, task: TaskSpec, result: SessionResult, was_found: bool, retries: int
) -> tuple[SessionResult, bool, int]:
    """Retry a sample while it fails; return its last result, whether that had been there before, and how
    often the sample was run again."""
    sample, tried = result.sample, 0
    for number in range(1, retries + 1):
        if not may_be_retried(task, result):
            break
        log.info("session %s failed and is retried: %s", result.session_id, result.error)
        found = [one async for one in ended_sessions(client, [retry_of(task, sample, number)])]
        result, was_found = found[-1]
        tried += not was_found
    return result.model_copy(update={"sample": sample}), was_found, tried


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """Return one error of the group: all calls go to one server, so the others say the same."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, PolarError) else group


async def ended_sessions(
    client: AsyncClient, tasks: Sequence[TaskSpec]
) -> AsyncGenerator[tuple[SessionResult, bool], None]:
    """Submit tasks and yield results as sessions end, with whether they had ended before."""
    found = {}
    for task in tasks:
        view = await retry_async(partial(client.submit, task))
        found[task.id] = sum(count for status, count in view.sessions.items() if status.ended)
    seen: Counter[str] = Counter()
    async for result in follow(client, list(found)):
        seen[result.task_id] += 1
        yield result, seen[result.task_id] <= found[result.task_id]


async def follow(
    client: AsyncClient, task_ids: Collection[str], cursor: int = 0
) -> AsyncGenerator[SessionResult, None]:
    """Yield the results of tasks after `cursor`, until all have ended, waiting for an unreachable server."""
    pauses = errors.RESTART.pauses()
    while True:
        try:
            # Including stale results: a trainer checks their age itself.
            async for page in client.result_pages(task_ids, cursor=cursor, follow=True):
                pauses = errors.RESTART.pauses()
                for result in page.results:
                    yield result
                cursor = page.cursor
            return
        except Unavailable as error:
            pause = next(pauses, None)
            if pause is None:
                raise
            log.warning("%s; asking again in %g s", error, pause)
            await asyncio.sleep(pause)


async def read_recording(client: AsyncClient, result: SessionResult) -> Recording | None:
    """Return a session's recording; log a warning and return None if it is lost or damaged."""
    if not result.has_recording:
        return None
    try:
        data = await retry_async(lambda: client.recording(result.session_id))
        return await asyncio.to_thread(decode, data)
    except (NotFound, DamagedRecording) as error:
        log.warning("session %s: cannot read its recording: %s", result.session_id, error)
        return None
