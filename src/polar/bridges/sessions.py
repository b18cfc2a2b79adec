"""Sessions as trainers take them: tasks are rolled out and come back as rewards, traces and advantages.

Every bridge begins here. A session has one trace or several (sub-agents, compacted contexts); a bridge whose
trainer takes one sequence per session narrows it, and whatever is left out on the way is counted by name.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import secrets
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
from polar.errors import InvalidInput, NotInstalled, explain
from polar.models.completion import Ids, Logprobs, Routing, Versions
from polar.models.task import TaskSpec
from polar.models.trace import Trace
from polar.trajectory.learnable import (
    Advantage,
    EndedSession,
    Excluded,
    baselines,
    learnable,
    trained_tokens,
)
from polar.trajectory.materialise import materialise

TASK = "polar_task"
"""In a trainer's row: the task, as JSON or as a mapping."""


def trainer_module(name: str, *, hint: str) -> Any:
    """The module with a trainer's types, from a package that Polar does not depend on."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise NotInstalled(f"this bridge needs {package}: {error}", hint=hint) from error


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoredSession(EndedSession):
    """An ended session with what can be learnt from it.

    The tokens that its traces train and those counted in `excluded` are together what its recording says is
    trainable.
    """

    traces: tuple[Trace, ...] = ()
    """Each has at least one trained token; none where the session has no reward or no recording."""
    excluded: Counter[str]

    @property
    def trained_tokens(self) -> int:
        return sum(map(trained_tokens, self.traces))

    def narrowed(self) -> ScoredSession:
        """Only the trace that trains most, for trainers that take one sequence per session."""
        best = max(self.traces, key=trained_tokens, default=None)
        return self if best is None else self._with((best,), Excluded.TOKENS_BEYOND_ONE_TRACE)

    def cut(self, prompt_tokens: int, response_tokens: int) -> ScoredSession:
        """As much of each trace as a trainer with these limits takes.

        A prompt is never cut: its trace would train tokens in a context that the policy did not have.
        """
        fitting = (
            _shortened(trace, response_tokens)
            for trace in self.traces
            if len(trace.prompt_ids) <= prompt_tokens
        )
        return self._with(
            tuple(trace for trace in fitting if trace.loss_mask.any()), Excluded.TOKENS_OVER_LENGTH
        )

    def routed(self) -> ScoredSession:
        """Only traces whose tokens all have their experts, for trainers that replay them and know no gaps."""
        whole = (trace for trace in self.traces if trace.routing is not None and not trace.unrouted_tokens)
        return self._with(tuple(whole), Excluded.TOKENS_UNROUTED)

    def _with(self, traces: tuple[Trace, ...], reason: Excluded) -> ScoredSession:
        lost = Counter({reason: self.trained_tokens - sum(map(trained_tokens, traces))})
        return replace(self, traces=traces, excluded=+(self.excluded + lost))


def scored(session: EndedSession, temperature: float) -> ScoredSession:
    """What a trainer that computes logprobs at this temperature can learn from a session."""
    result, recording = session.result, session.recording
    excluded: Counter[str] = Counter()
    if session.reward is None:
        excluded[Excluded.SESSIONS_FAILED] += 1
        return ScoredSession(result, recording, excluded=excluded)
    if recording is None:
        unreadable, untrainable = Excluded.SESSIONS_UNREADABLE, Excluded.SESSIONS_UNTRAINABLE
        excluded[unreadable if result.has_recording else untrainable] += 1
        return ScoredSession(result, excluded=excluded)
    if not recording.trajectory.traces:
        excluded[Excluded.SESSIONS_UNTRAINABLE] += 1
    found = [
        # How stale a token may be is for the trainer to say: it gets the versions.
        learnable(materialise(recording.trajectory, ref), recording, temperature, excluded)
        for ref in recording.trajectory.traces
    ]
    traces = tuple(trace for trace in found if trace.loss_mask.any())
    return ScoredSession(result, recording, traces=traces, excluded=+excluded)


def advantages(group: Sequence[ScoredSession], kind: Advantage = Advantage.GROUP) -> list[list[float]]:
    """For each session, the advantage of each of its traces, by its share of the session's reward.

    Each session counts once; one that failed is not compared. All are 0 where no two rewards differ: then
    there is nothing to learn.
    """
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
    """What a trainer wants rolled out."""

    task: TaskSpec
    samples: int = 1


async def roll_out_groups(
    client: AsyncClient, orders: Sequence[Order], temperature: float = 1.0
) -> list[tuple[ScoredSession, ...]]:
    """Each order's sessions in the order of their samples, once all have ended."""
    run = secrets.token_hex(4)
    tasks = [
        training_task(order.task, f"{run}-{number}", order.samples, temperature)
        for number, order in enumerate(orders)
    ]
    found: dict[str, list[RolledOut]] = {task.id: [] for task in tasks}
    await roll_out(client, tasks, lambda ended: found[ended.task.id].append(ended))
    return await asyncio.to_thread(
        lambda: [
            tuple(scored(one, temperature) for one in sorted(group, key=lambda one: one.result.sample))
            for group in found.values()
        ]
    )


async def one_session(client: AsyncClient, task: TaskSpec, temperature: float = 1.0) -> ScoredSession:
    """One session of a task, for trainers that ask for the samples of a group one by one."""
    # With a fixed seed all of the group would be the same.
    sampling = task.sampling.model_copy(update={"seed": None})
    ((session,),) = await roll_out_groups(
        client, [Order(task.model_copy(update={"sampling": sampling}))], temperature
    )
    return session


def task_of(row: Mapping[str, Any]) -> TaskSpec:
    """The task that a trainer's row carries."""
    given = row.get(TASK)
    if given is None:
        raise InvalidInput(f"the row has no {TASK!r}", hint="make rows with polar.bridges.sessions.task_row")
    try:
        return TaskSpec.model_validate(as_document(given))
    except ValidationError as error:
        raise InvalidInput(f"{TASK}: {explain(error)}") from None


def as_document(given: Any) -> Any:
    """What a row carries: an object, or its text, so that tasks of any form fit one schema."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InvalidInput(f"{TASK}: not JSON: {error}") from None


def task_row(task: TaskSpec) -> dict[str, str]:
    """A task as a trainer's row carries it."""
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

    def up_to_the_last_trained(self) -> Aligned:
        """Without the tokens at the end that are not trained: nothing that is trained stands after them."""
        end = int(np.flatnonzero(self.mask)[-1]) + 1
        routing = None if self.routing is None else self.routing[:end]
        return Aligned(self.ids[:end], self.mask[:end], self.logprobs[:end], self.versions[:end], routing)


def aligned(trace: Trace) -> Aligned:
    prompt = len(trace.prompt_ids)
    return Aligned(
        np.concatenate([trace.prompt_ids, trace.response_ids]),
        np.concatenate([np.zeros(prompt, np.uint8), trace.loss_mask]),
        np.concatenate([np.zeros(prompt, np.float32), trace.logprobs]),
        np.concatenate([np.full(prompt, -1, np.int32), trace.policy_versions]),
        trace.routing,
    )


def response_lists(trace: Trace) -> tuple[list[int], list[int], list[int], list[float]]:
    """Prompt, response, mask and logprobs, for trainers that take prompt and response apart."""
    return (
        trace.prompt_ids.tolist(),
        trace.response_ids.tolist(),
        trace.loss_mask.tolist(),
        trace.logprobs.tolist(),
    )


def routes(trace: Trace | None, layers: int, experts: int) -> NDArray[np.int16]:
    """[tokens, layers, experts] of a routed trace, without its last token, which no engine has computed.

    Of a session that there is nothing to learn from, for its filling: the first experts of each layer.
    """
    if trace is None or trace.routing is None:
        return np.tile(np.arange(experts, dtype=np.int16), (1, layers, 1))
    return trace.routing[:-1].astype(np.int16).reshape(-1, layers, experts)


def filling(token: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """As `response_lists`, for a session that there is nothing to learn from: two tokens, not trained."""
    return [token], [token], [0], [0.0]


def _shortened(trace: Trace, response_tokens: int) -> Trace:
    arrays = ("response_ids", "loss_mask", "logprobs", "policy_versions")
    routing = None if trace.routing is None else trace.routing[: len(trace.prompt_ids) + response_tokens]
    kept = {name: getattr(trace, name)[:response_tokens] for name in arrays}
    return replace(trace, **kept, routing=routing)
