"""SkyRL: a generator whose trajectories are Polar sessions.

    class Experiment(BasePPOExp):
        def get_generator(self, cfg, tokenizer, inference_engine_client):
            return PolarGenerator(filler=tokenizer.eos_token_id)

A row's extras carry its task. With `generator.step_wise_trajectories`, each trace is a step of a trajectory,
whose advantage is that of its last step, counted once per session. Without it, SkyRL takes one sequence per
session. Mask, rewards and logprobs cover only the response.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from polar.bridges.sessions import (
    Order,
    ScoredSession,
    filling,
    response_lists,
    roll_out_groups,
    task_of,
    trainer_module,
)
from polar.client import AsyncClient
from polar.errors import InvalidInput
from polar.models.session import AgentEnd

_skyrl = trainer_module("skyrl.train.generators.base", hint="install skyrl on Python 3.12: pip install skyrl")


class PolarGenerator(_skyrl.GeneratorInterface):  # type: ignore[misc,name-defined]
    """Rolls out SkyRL's batches on a rollout server."""

    def __init__(
        self, *, filler: int, step_wise: bool = True, server: str | None = None, token: str | None = None
    ) -> None:
        """Use `filler`, any token of the vocabulary, for sessions with nothing to learn."""
        self._filler = filler
        self._step_wise = step_wise
        self._server, self._token = server, token

    async def generate(self, input_batch: Any) -> Any:
        tasks = [task_of(extras or {}) for extras in _extras(input_batch)]
        places: dict[str, list[int]] = defaultdict(list)
        for number, task in enumerate(tasks):
            places[task.id].append(number)
        orders = [Order(tasks[numbers[0]], len(numbers)) for numbers in places.values()]
        temperature = float((input_batch.get("sampling_params") or {}).get("temperature", 1.0))
        async with AsyncClient(self._server, self._token) as client:
            groups = await roll_out_groups(client, orders, temperature)
        found: dict[int, ScoredSession] = {}
        for numbers, group in zip(places.values(), groups, strict=True):
            found |= zip(numbers, group, strict=True)
        sessions = [found[number] for number in range(len(tasks))]
        return output(sessions, input_batch.get("trajectory_ids"), self._filler, step_wise=self._step_wise)


def output(
    sessions: Sequence[ScoredSession], ids: Sequence[Any] | None, filler: int, *, step_wise: bool
) -> dict[str, Any]:
    """Return the sessions as parallel lists, with each session's traces adjacent."""
    if step_wise and ids is None:
        raise InvalidInput("step-wise trajectories require trajectory ids", hint="set step_wise=False")
    rows: dict[str, list[Any]] = {
        name: []
        for name in (
            "prompt_token_ids",
            "response_ids",
            "loss_masks",
            "rollout_logprobs",
            "rewards",
            "stop_reasons",
            "trajectory_ids",
            "is_last_step",
        )
    }
    excluded: Counter[str] = Counter()
    rewards = _rewards(sessions, ids)
    for number, given in enumerate(sessions):
        session = given if step_wise else given.with_one_trace()
        excluded += session.excluded
        identity = None if ids is None else ids[number]
        steps = [response_lists(trace) for trace in session.traces] or [filling(filler)]
        for at, step in enumerate(steps):
            is_last = at == len(steps) - 1
            reward = rewards[number] if is_last else 0.0
            values = (*step, reward, _stop_reason(session), identity, is_last)
            for name, value in zip(rows, values, strict=True):
                rows[name].append(value)
    optional = {} if step_wise else {"is_last_step": None}
    named = {} if ids is not None else {"trajectory_ids": None}
    metrics = {f"polar/excluded/{name}": count for name, count in excluded.items()}
    return {**rows, **optional, **named, "rollout_metrics": metrics}


def _rewards(sessions: Sequence[ScoredSession], ids: Sequence[Any] | None) -> list[float]:
    """Return each session's reward; a failed session gets its group's mean, which changes nothing."""
    groups = [one.result.task_id for one in sessions] if ids is None else [one.instance_id for one in ids]
    scored: dict[str, list[float]] = defaultdict(list)
    for group, session in zip(groups, sessions, strict=True):
        if session.reward is not None:
            scored[group].append(session.reward)
    return [
        fmean(scored[group] or [0.0]) if session.reward is None else session.reward
        for group, session in zip(groups, sessions, strict=True)
    ]


def _stop_reason(session: ScoredSession) -> str:
    if session.reward is None:
        return "error"
    return "stop" if session.result.agent_end is AgentEnd.EXITED else "length"


def _extras(input_batch: Any) -> list[Any]:
    extras = input_batch.get("env_extras")
    if extras is None:
        raise InvalidInput("the batch has no env_extras", hint="add a polar_task column to the dataset")
    return list(extras)
