"""Sessions as trainers take them: tasks are rolled out and come back as rewards, traces and advantages.

Every bridge builds on this. A session has one or more traces (sub-agents, compacted contexts); a bridge whose
trainer takes one sequence per session keeps one, and everything left out is counted by reason.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from polar.app.rollouts import RolledOut, roll_out, training_task
from polar.client import AsyncClient
from polar.config.settings import environment_run
from polar.errors import InvalidInput, NotInstalled, explain
from polar.models.completion import Ids, Logprobs, Routing, Versions
from polar.models.task import Run, RunKind, TaskSpec
from polar.models.trace import Trace
from polar.trajectory.learnable import (
    Advantage,
    EndedSession,
    Excluded,
    baselines,
    learnable,
    trained_tokens,
    truncate,
)
from polar.trajectory.materialise import materialise

TASK = "polar_task"
"""The key of the task, as JSON or as a mapping, in a trainer's row."""


def trainer_module(name: str, *, hint: str) -> Any:
    """Import the module with a trainer's types, from a package that Polar does not depend on."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise NotInstalled(f"this bridge needs {package}: {error}", hint=hint) from error


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredSession(EndedSession):
    """An ended session with what can be learned from it.

    The tokens that its traces train and those counted in `excluded` add up to the trainable tokens of its
    recording.
    """

    traces: tuple[Trace, ...] = ()
    """Traces with at least one trained token each; none if the session has no reward or no recording."""
    excluded: Counter[str]

    @property
    def trained_tokens(self) -> int:
        return sum(map(trained_tokens, self.traces))

    def with_one_trace(self) -> ScoredSession:
        """Keep the trace that trains the most tokens, for trainers that take one sequence per session."""
        best = max(self.traces, key=trained_tokens, default=None)
        return self if best is None else self._with((best,), Excluded.TOKENS_BEYOND_ONE_TRACE)

    def truncated(self, prompt_tokens: int, response_tokens: int) -> ScoredSession:
        """Cut each trace to a trainer's limits.

        Traces with longer prompts are dropped: cutting a prompt would train tokens in a context that the
        policy did not have.
        """
        fitting = (
            truncate(trace, response_tokens)
            for trace in self.traces
            if len(trace.prompt_ids) <= prompt_tokens
        )
        return self._with(
            tuple(trace for trace in fitting if trace.loss_mask.any()), Excluded.TOKENS_OVER_LENGTH
        )

    def with_routing(self) -> ScoredSession:
        """Keep only traces whose tokens all have recorded experts, for trainers that replay routing."""
        whole = (trace for trace in self.traces if trace.routing is not None and not trace.unrouted_tokens)
        return self._with(tuple(whole), Excluded.TOKENS_UNROUTED)

    def _with(self, traces: tuple[Trace, ...], reason: Excluded) -> ScoredSession:
        lost = Counter({reason: self.trained_tokens - sum(map(trained_tokens, traces))})
        return replace(self, traces=traces, excluded=+(self.excluded + lost))


def scored_session(session: EndedSession, temperature: float) -> ScoredSession:
    """Return what a trainer that computes logprobs at this temperature can learn from a session."""
    result, recording = session.result, session.recording
    excluded: Counter[str] = Counter()
    if session.unscored is not None:
        excluded[session.unscored] += 1
        return ScoredSession(result, recording, excluded=excluded)
    if recording is None:
        unreadable, untrainable = Excluded.SESSIONS_UNREADABLE, Excluded.SESSIONS_UNTRAINABLE
        excluded[unreadable if result.has_recording else untrainable] += 1
        return ScoredSession(result, excluded=excluded)
    if not recording.trajectory.traces:
        excluded[Excluded.SESSIONS_UNTRAINABLE] += 1
    found = [
        # The trainer decides how stale a token may be: it gets the versions.
        learnable(materialise(recording.trajectory, ref), recording, temperature, excluded)
        for ref in recording.trajectory.traces
    ]
    traces = tuple(trace for trace in found if trace.loss_mask.any())
    return ScoredSession(result, recording, traces=traces, excluded=+excluded)


def advantages(group: Sequence[ScoredSession], kind: Advantage = Advantage.GROUP) -> list[list[float]]:
    """Return the advantage of each trace of each session, by its share of the session's reward.

    Each session counts once, and failed sessions are not compared. If all rewards are equal, all
    advantages are 0: there is nothing to learn.
    """
    if kind.is_of_trees or kind is Advantage.NONE:
        raise InvalidInput(
            f"advantage {kind}: bridges compare whole sessions", hint="choose group, mean or leave_one_out"
        )
    rewards = [[] if session.reward is None else [session.reward] for session in group]
    return [
        [
            0.0 if baseline is None else baseline.advantage(session.reward or 0.0, trace.share)
            for trace in session.traces
        ]
        for session, baseline in zip(group, baselines(rewards, kind), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Order:
    """A task and the number of samples that a trainer wants of it."""

    task: TaskSpec
    samples: int = 1


async def roll_out_groups(
    client: AsyncClient, orders: Sequence[Order], temperature: float = 1.0
) -> list[tuple[ScoredSession, ...]]:
    """Roll out all orders, then return each order's sessions sorted by sample.

    Trainers count on the number of sessions that they asked for, so tasks have no branches here.
    """
    call = secrets.token_hex(4)
    tasks = [
        training_task(
            order.task.model_copy(update={"branching": None}), f"{call}-{number}", order.samples, temperature
        )
        for number, order in enumerate(orders)
    ]
    found: dict[str, list[RolledOut]] = {task.id: [] for task in tasks}
    await roll_out(client, tasks, lambda ended: found[ended.task.id].append(ended), run=run_of_trainer())
    return await asyncio.to_thread(
        lambda: [
            tuple(
                scored_session(one, temperature) for one in sorted(group, key=lambda one: one.result.sample)
            )
            for group in found.values()
        ]
    )


@functools.cache
def run_of_trainer() -> Run:
    """Return the run that this process rolls out for: $POLAR_RUN, or one for each day, since a trainer's
    workers know nothing of each other."""
    return Run.named(environment_run() or f"bridge-{time.strftime('%Y-%m-%d')}", RunKind.BRIDGE)


async def one_session(client: AsyncClient, task: TaskSpec, temperature: float = 1.0) -> ScoredSession:
    """Roll out one session, for trainers that ask for the samples of a group one by one."""
    # With a fixed seed, all samples of the group would be identical.
    sampling = task.sampling.model_copy(update={"seed": None})
    ((session,),) = await roll_out_groups(
        client, [Order(task.model_copy(update={"sampling": sampling}))], temperature
    )
    return session


def task_of(row: Mapping[str, Any]) -> TaskSpec:
    given = row.get(TASK)
    if given is None:
        raise InvalidInput(f"the row has no {TASK!r}", hint="make rows with polar.bridges.sessions.task_row")
    try:
        return TaskSpec.model_validate(as_document(given))
    except ValidationError as error:
        raise InvalidInput(f"{TASK}: {explain(error)}") from None


def as_document(given: Any) -> Any:
    """Return a row's value as an object; rows may carry it as JSON, so that any task fits one schema."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InvalidInput(f"{TASK}: not JSON: {error}") from None


def task_row(task: TaskSpec) -> dict[str, str]:
    return {TASK: task.model_dump_json(exclude_defaults=True)}


_CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncClient] = WeakKeyDictionary()


def client_of_this_loop() -> AsyncClient:
    """Return the client of this event loop, for bridges that trainers call as plain functions.

    The server is given by $POLAR_SERVER and $POLAR_TOKEN. The client is reused, since creating one takes as
    long as many requests.
    """
    loop = asyncio.get_running_loop()
    if loop not in _CLIENTS:
        _CLIENTS[loop] = AsyncClient()
    return _CLIENTS[loop]


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A trace as one sequence, prompt and response together.

    All arrays have one length; over the prompt the mask is 0, logprobs are 0.0 and versions -1.
    """

    ids: Ids
    mask: NDArray[np.uint8]
    logprobs: Logprobs
    versions: Versions
    routing: Routing | None = None

    def without_untrained_tail(self) -> Aligned:
        """Cut untrained tokens at the end, which no trained token follows."""
        end = int(np.flatnonzero(self.mask)[-1]) + 1
        routing = None if self.routing is None else self.routing[:end]
        return Aligned(self.ids[:end], self.mask[:end], self.logprobs[:end], self.versions[:end], routing)


def align(trace: Trace) -> Aligned:
    prompt = len(trace.prompt_ids)
    return Aligned(
        np.concatenate([trace.prompt_ids, trace.response_ids]),
        np.concatenate([np.zeros(prompt, np.uint8), trace.loss_mask]),
        np.concatenate([np.zeros(prompt, np.float32), trace.logprobs]),
        np.concatenate([np.full(prompt, -1, np.int32), trace.policy_versions]),
        trace.routing,
    )


def response_lists(trace: Trace) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return prompt, response, mask and logprobs, for trainers that separate prompt and response."""
    return (
        trace.prompt_ids.tolist(),
        trace.response_ids.tolist(),
        trace.loss_mask.tolist(),
        trace.logprobs.tolist(),
    )


def routes(trace: Trace | None, layers: int, experts: int) -> NDArray[np.int16]:
    """Return the experts of a trace as [tokens, layers, experts], without those of its last token.

    No engine computed the last token. Without a trace, return the first experts of each layer for
    `filling`.
    """
    if trace is None or trace.routing is None:
        return np.tile(np.arange(experts, dtype=np.int16), (1, layers, 1))
    return trace.routing[:-1].astype(np.int16).reshape(-1, layers, experts)


def filling(token: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """Return `response_lists` for a session with nothing to learn: two untrained tokens."""
    return [token], [token], [0], [0.0]
