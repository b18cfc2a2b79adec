"""One way to roll tasks out: submit them, follow their results, retry what failed, read what was recorded."""

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
from polar.models.task import TaskSpec
from polar.recordings.recording import DamagedRecording, Recording, decode
from polar.trajectory.learnable import EndedSession

log = logging.getLogger(__name__)

MAX_ID = 128
"""The longest id of a task."""
MOST_TASKS_AT_ONCE = 64
"""Each task in flight is followed on a connection of its own."""
DOWNLOADS = 8
"""How many recordings are read at once."""
_LONGEST_NAME = 80
_DIGEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut(EndedSession):
    """A session that `roll_out` has brought to its end."""

    task: TaskSpec
    """As it was given to `roll_out`; the result of a retry names another one."""
    was_found: bool
    """It had ended before this call."""
    retries: int
    """How often its sample was tried again by this call."""


Ended = Callable[[RolledOut], None]


def identified(task: TaskSpec, run: str = "") -> TaskSpec:
    """The task under an id that follows from its content, so that what has been done is found again.

    Another `run` gives another id.
    """
    document = task.model_dump(mode="json", exclude_defaults=True)
    content = orjson.dumps([run, document], option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST]
    return task.model_copy(update={"id": f"{task.id[:_LONGEST_NAME]}-{digest}"})


def retry_of(task: TaskSpec, sample: int, number: int) -> TaskSpec:
    """One sample alone, with the seed that it had in its task."""
    sampling = task.sampling
    if sampling.seed is not None:
        sampling = sampling.model_copy(update={"seed": sampling.seed + sample})
    changes = {"samples": 1, "early_stop": None, "sampling": sampling}
    return task.model_copy(update={**changes, "id": f"{task.id}-retry{number}-{sample}"})


def training_task(task: TaskSpec, prefix: str, samples: int, temperature: float) -> TaskSpec:
    """The task under an id of its own, sampled as trainers compute logprobs: from the whole distribution."""
    sampling = task.sampling.model_copy(update={"temperature": temperature, "top_p": 1.0, "top_k": 0})
    changes = {"samples": samples, "sampling": sampling, "early_stop": None}
    return task.model_copy(update={"id": f"{prefix}-{task.id}"[:MAX_ID], **changes})


async def roll_out(
    client: AsyncClient,
    tasks: Sequence[TaskSpec],
    ended: Ended,
    *,
    at_once: int | None = None,
    retries: int = 0,
    skip: Container[tuple[str, int]] = (),
    with_recordings: bool = True,
) -> None:
    """Bring every sample of every task to its end, and pass each to `ended` once.

    A task that the server has under its id already is not run again: what has ended is found. A server that
    cannot be reached is waited for. `at_once` bounds the tasks in flight; None submits all of them. A failed
    sample is tried again `retries` times. Samples in `skip`, named by task and number, are left out.
    """
    downloads = asyncio.Semaphore(DOWNLOADS)

    async def finish(task: TaskSpec, result: SessionResult, was_found: bool) -> None:
        sample, tried = result.sample, 0
        for number in range(1, retries + 1):
            if result.status is not SessionStatus.FAILED:
                break
            log.info("session %s failed and is tried again: %s", result.session_id, result.error)
            found = [one async for one in ended_sessions(client, [retry_of(task, sample, number)])]
            result, was_found = found[-1]
            tried += not was_found
        recording = None
        if with_recordings:
            async with downloads:
                recording = await read_recording(client, result)
        result = result.model_copy(update={"sample": sample})
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

    batches = iter([tasks] if at_once is None else [[task] for task in tasks])
    workers = 1 if at_once is None else min(at_once, MOST_TASKS_AT_ONCE, len(tasks))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work())
    except ExceptionGroup as group_error:
        raise _first(group_error) from None


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """All calls go to one server: what one of them says of it is what the others would."""
    error: Exception = group
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, PolarError) else group


async def ended_sessions(
    client: AsyncClient, tasks: Sequence[TaskSpec]
) -> AsyncGenerator[tuple[SessionResult, bool], None]:
    """Submit tasks and yield results in the order in which sessions end, and whether they had before."""
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
    """The results of tasks after `cursor`, until all have ended; waits for a server that is away."""
    pauses = errors.RESTART.pauses()
    while True:
        try:
            # With stale results, which have ended like the others: whoever learns from them tells their age.
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
    """What was recorded of a session; None, with a warning, where that is lost or damaged."""
    if not result.has_recording:
        return None
    try:
        data = await retry_async(lambda: client.recording(result.session_id))
        return await asyncio.to_thread(decode, data)
    except (NotFound, DamagedRecording) as error:
        log.warning("session %s: its recording cannot be read: %s", result.session_id, error)
        return None
