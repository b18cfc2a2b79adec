"""Sessions as trainers take them: tasks are rolled out and come back as rewards and traces.

Every bridge begins here. A session has one trace or several (sub-agents, compacted contexts); a bridge whose
trainer takes one sequence a session narrows it, and whatever is left out on the way is counted by name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import ValidationError

from polar.client import AsyncClient
from polar.errors import InvalidInput, NotFound, explain, retry_async
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import TaskSpec
from polar.models.trace import Trace
from polar.recordings.recording import DamagedRecording, Recording, decode
from polar.training.groups import Excluded, learnable
from polar.training.rollouts import rollout_of
from polar.training.settings import ObjectiveSettings
from polar.training.versions import Versions
from polar.trajectory.materialise import materialise

log = logging.getLogger(__name__)

TASK = "polar_task"
"""In a trainer's row: the task, as JSON or as a mapping."""

DOWNLOADS = 8
"""How many recordings are read at once."""

T = TypeVar("T")


class LeftOut(StrEnum):
    """Why a session or its tokens do not reach a trainer; the names beside `Excluded`'s."""

    SESSIONS_UNTRAINABLE = "sessions_untrainable"
    """Nothing trainable was recorded; `result.stats` says why. Their rewards still count."""
    TOKENS_BEYOND_ONE_TRACE = "tokens_beyond_one_trace"
    """The trainer takes one sequence a session, and these stand in another."""
    TOKENS_OVER_LENGTH = "tokens_over_length"
    """They stand after the longest prompt or response that the trainer takes."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoredSession:
    """An ended session.

    The tokens that its traces train and those counted in `excluded` are together what its recording says is
    trainable.
    """

    result: SessionResult
    recording: Recording | None
    traces: tuple[Trace, ...]
    """Each has at least one trained token; none where the session has no reward or no recording."""
    excluded: Counter[str]

    @property
    def reward(self) -> float | None:
        """None where it failed: such a session says nothing about the policy."""
        return self.result.reward if self.result.status is SessionStatus.COMPLETED else None

    @property
    def trained_tokens(self) -> int:
        return sum(map(trained_tokens, self.traces))

    def narrowed(self) -> ScoredSession:
        """Only the trace that trains most, for trainers that take one sequence a session."""
        best = max(range(len(self.traces)), key=lambda at: trained_tokens(self.traces[at]), default=None)
        if best is None:
            return self
        chosen = self.traces[best]
        others = Counter({LeftOut.TOKENS_BEYOND_ONE_TRACE: self.trained_tokens - trained_tokens(chosen)})
        return replace(self, traces=(chosen,), excluded=+(self.excluded + others))

    def cut(self, prompt_tokens: int, response_tokens: int) -> ScoredSession:
        """As much of each trace as a trainer with these limits takes.

        A prompt is never cut: its trace would train tokens in a context that the policy did not have.
        """
        kept = [
            _shortened(trace, response_tokens)
            for trace in self.traces
            if len(trace.prompt_ids) <= prompt_tokens
        ]
        traces = tuple(trace for trace in kept if trace.loss_mask.any())
        lost = self.trained_tokens - sum(map(trained_tokens, traces))
        return replace(
            self, traces=traces, excluded=+(self.excluded + Counter({LeftOut.TOKENS_OVER_LENGTH: lost}))
        )


def trained_tokens(trace: Trace) -> int:
    return int(np.count_nonzero(trace.loss_mask))


def scored(result: SessionResult, recording: Recording | None, temperature: float) -> ScoredSession:
    """What a trainer that computes logprobs at this temperature can learn from a session."""
    excluded: Counter[str] = Counter()
    if result.status is not SessionStatus.COMPLETED or result.verdict is None:
        excluded[Excluded.SESSIONS_FAILED] += 1
        return ScoredSession(result, recording, (), excluded)
    if recording is None:
        excluded[Excluded.SESSIONS_UNREADABLE if result.has_recording else LeftOut.SESSIONS_UNTRAINABLE] += 1
        return ScoredSession(result, None, (), excluded)
    if not recording.trajectory.traces:
        excluded[LeftOut.SESSIONS_UNTRAINABLE] += 1
    objective = ObjectiveSettings(temperature=temperature)
    traces = [
        # How stale a token may be is for the trainer to say: it gets the versions.
        learnable(materialise(recording.trajectory, ref), recording, objective, Versions(0), excluded)
        for ref in recording.trajectory.traces
    ]
    return ScoredSession(
        result, recording, tuple(trace for trace in traces if trace.loss_mask.any()), +excluded
    )


@dataclass(frozen=True, slots=True)
class Order:
    """What a trainer wants rolled out."""

    task: TaskSpec
    samples: int = 1


async def roll_out(
    client: AsyncClient, orders: Sequence[Order], temperature: float = 1.0
) -> list[tuple[ScoredSession, ...]]:
    """Each order's sessions in the order of their samples, once all have ended."""
    run = secrets.token_hex(4)
    specs = [
        rollout_of(order.task, f"{run}-{number}", order.samples, temperature)
        for number, order in enumerate(orders)
    ]
    for spec in specs:
        await retry_async(partial(client.submit, spec))
    results = await retry_async(lambda: client.wait([spec.id for spec in specs]))
    turns = asyncio.Semaphore(DOWNLOADS)

    async def read(result: SessionResult) -> ScoredSession:
        async with turns:
            data = await _recording(client, result)
            return await asyncio.to_thread(_read, result, data, temperature)

    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(read(result)) for result in results]
    found: dict[str, list[ScoredSession]] = {spec.id: [] for spec in specs}
    for one in sorted((task.result() for task in reading), key=lambda one: one.result.sample):
        found[one.result.task_id].append(one)
    return [tuple(found[spec.id]) for spec in specs]


async def one_session(client: AsyncClient, task: TaskSpec, temperature: float = 1.0) -> ScoredSession:
    """One session of a task, for trainers that ask for the samples of a group one by one."""
    # With a fixed seed all of the group would be the same.
    sampling = task.sampling.model_copy(update={"seed": None})
    ((session,),) = await roll_out(
        client, [Order(task.model_copy(update={"sampling": sampling}))], temperature
    )
    return session


def task_of(row: Mapping[str, Any]) -> TaskSpec:
    """The task that a trainer's row carries."""
    given = row.get(TASK)
    if given is None:
        raise InvalidInput(f"the row has no {TASK!r}", hint="make rows with polar.bridges.sessions.task_row")
    try:
        return TaskSpec.model_validate(json.loads(given) if isinstance(given, str) else given)
    except ValidationError as error:
        raise InvalidInput(f"{TASK}: {explain(error)}") from None
    except ValueError as error:
        raise InvalidInput(f"{TASK}: not JSON: {error}") from None


def task_row(task: TaskSpec) -> dict[str, str]:
    """A task as a trainer's row carries it: text, so that tables of tasks of any form have one schema."""
    return {TASK: task.model_dump_json(exclude_defaults=True)}


_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = WeakKeyDictionary()


def client_of_this_loop() -> AsyncClient:
    """The server that $POLAR_SERVER and $POLAR_TOKEN name, for bridges that trainers call as bare functions.

    One for each event loop: making one takes as long as many requests do.
    """
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        _CLIENTS[loop] = AsyncClient()
    return _CLIENTS[loop]


def _shortened(trace: Trace, response_tokens: int) -> Trace:
    return replace(
        trace,
        response_ids=trace.response_ids[:response_tokens],
        loss_mask=trace.loss_mask[:response_tokens],
        logprobs=trace.logprobs[:response_tokens],
        policy_versions=trace.policy_versions[:response_tokens],
    )


def _read(result: SessionResult, data: bytes | None, temperature: float) -> ScoredSession:
    try:
        recording = None if data is None else decode(data)
    except DamagedRecording as error:
        log.warning("session %s: %s", result.session_id, error)
        recording = None
    return scored(result, recording, temperature)


async def _recording(client: AsyncClient, result: SessionResult) -> bytes | None:
    if not result.has_recording:
        return None
    try:
        return await retry_async(lambda: client.recording(result.session_id))
    except NotFound as error:
        log.warning("session %s: %s", result.session_id, error)
        return None
