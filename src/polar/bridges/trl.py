"""TRL: a `rollout_func` for GRPOTrainer.

    rollouts = Rollouts(load_tasks(Path("tasks.yaml")))
    GRPOTrainer(..., train_dataset=rollouts.dataset(), rollout_func=rollouts, reward_funcs=reward)

A prompt of the dataset is a task's id. TRL takes one row per session, with separate prompt and response;
logprobs and mask cover only the response.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.app.weights import EngineWeights
from polar.bridges.sessions import (
    Order,
    ScoredSession,
    filling,
    response_lists,
    roll_out_groups,
    trainer_module,
)
from polar.client import AsyncClient, Client
from polar.errors import InvalidInput
from polar.models.task import TaskSpec

trainer_module("trl", hint="pip install 'trl>=1.16,<2'")

log = logging.getLogger(__name__)

REWARD = "polar_reward"
"""The column that carries rewards from the rollouts to `reward`."""


class Rollouts:
    """Rolls out the trainer's prompts on a rollout server, with the trainer's current weights."""

    def __init__(
        self,
        tasks: Sequence[TaskSpec],
        *,
        server: str | None = None,
        token: str | None = None,
        weights: Path | None = None,
    ) -> None:
        """Write weights to the directory `weights`, which nodes must be able to read (below `weight_roots`).

        Without it, they are written to shared memory. Without server and token, $POLAR_SERVER and
        $POLAR_TOKEN apply, else the server on this machine.
        """
        self._tasks = {task.id: task for task in tasks}
        self._server, self._token = server, token
        self._weights = weights
        self._pushed: int | None = None
        self._sink: EngineWeights | None = None
        self.excluded: Counter[str] = Counter()
        """Counts by reason what was rolled out but not learned from."""

    def dataset(self) -> list[dict[str, str]]:
        return [{"prompt": id} for id in self._tasks]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        counts = Counter(prompts)
        if unknown := sorted(counts.keys() - self._tasks.keys()):
            raise InvalidInput(f"no task has the id {unknown[0]!r}", hint="train on Rollouts.dataset()")
        self._push(trainer)
        orders = [Order(self._tasks[id], samples) for id, samples in counts.items()]
        # In a separate thread, since the trainer may be running in an event loop itself.
        with ThreadPoolExecutor(1) as thread:
            groups = thread.submit(asyncio.run, self._roll_out(orders, trainer.args.temperature)).result()
        waiting = {id: iter(group) for id, group in zip(counts, groups, strict=True)}
        sessions = [next(waiting[id]).with_one_trace() for id in prompts]
        left_out = sum((one.excluded for one in sessions), Counter[str]())
        if left_out:
            log.info("left out: %s", dict(left_out))
        self.excluded += left_out
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        return columns(sessions, filler=tokenizer.eos_token_id)

    async def _roll_out(self, orders: Sequence[Order], temperature: float) -> list[tuple[ScoredSession, ...]]:
        async with AsyncClient(self._server, self._token) as client:
            return await roll_out_groups(client, orders, temperature)

    def _push(self, trainer: Any) -> None:
        """Push the weights of this step to the engines, from one process only."""
        step = trainer.state.global_step
        if self._pushed == step:
            return
        if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            raise InvalidInput(
                "this bridge cannot write weights that are sharded over processes",
                hint="train with the whole model in every process: on one GPU, or on several with DDP",
            )
        if trainer.accelerator.is_main_process and self._sink is None:
            client = Client(self._server, self._token)
            self._sink = EngineWeights(client, Path(trainer.args.output_dir), self._weights)
        if self._sink is not None:
            self._sink.push(_TrainerModel(trainer))
        trainer.accelerator.wait_for_everyone()
        self._pushed = step


def reward(completions: Sequence[Any], polar_reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Return the evaluator's rewards. TRL leaves rows without one out of their group's mean."""
    return list(polar_reward)


def columns(sessions: Sequence[ScoredSession], filler: int) -> dict[str, list[Any]]:
    """Return one row per session; one with nothing to learn becomes a row of two untrained tokens."""
    found: dict[str, list[Any]] = {
        name: [] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs", REWARD, "polar_session")
    }
    for session in sessions:
        row = response_lists(*session.traces) if session.traces else filling(filler)
        values = (*row, session.reward, session.result.session_id)
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    return found


@dataclass(frozen=True, slots=True)
class _TrainerModel:
    trainer: Any

    def export(self, directory: Path) -> None:
        self.trainer.save_model(str(directory))
