"""AReaL: a rollout workflow whose episodes are groups of Polar sessions.

A row of the dataset carries its task, and an episode is all sessions of its group. AReaL normalises rewards
in blocks of a fixed number of rows, which a session with several traces, or with none, would shift. So the
`rewards` of an episode are advantages already, and AReaL is told to leave them as they are; each session
counts once in its group, and one that failed is not compared.

An episode is a batch with a row for each trace: mask, logprobs and versions have the length of prompt and
response together, and shorter rows are filled up on the right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.bridges.sessions import (
    Order,
    ScoredSession,
    advantages,
    aligned,
    client_of_this_loop,
    roll_out_groups,
    task_of,
    trainer_module,
)
from polar.errors import InvalidInput

_HINT = "install AReaL as its documentation says"
_areal = trainer_module("areal.api.workflow_api", hint=_HINT)
_context = trainer_module("areal.infra.workflow_context", hint=_HINT)
_stats = trainer_module("areal.utils.stats_tracker", hint=_HINT)

LEFT_ALONE = {
    "gconfig.n_samples": 1,
    "actor.reward_norm": None,
    "actor.reward_bias": 0.0,
    "actor.reward_scaling": 1.0,
    "actor.overlong_reward_penalty": False,
    "actor.mask_no_eos_with_zero": False,
    "actor.discount": 1.0,
    "actor.gae_lambda": 1.0,
}
"""What AReaL's configuration must say for advantages to reach every token of a row as they are."""


class PolarWorkflow(_areal.RolloutWorkflow):  # type: ignore[misc,name-defined]
    """Runs one group of sessions for each episode."""

    def __init__(self, samples: int, temperature: float = 1.0) -> None:
        """`samples` sessions make a group. The trainer computes logprobs at this temperature."""
        self._samples = samples
        self._temperature = temperature

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        orders = [Order(task_of(data), self._samples)]
        (group,) = await roll_out_groups(client_of_this_loop(), orders, self._temperature)
        report(group)
        return episode(group)


def workflow(config: Any, samples: int) -> PolarWorkflow:
    """The workflow for a trainer with this configuration, which must not normalise rewards once more."""
    for name, wanted in LEFT_ALONE.items():
        section, _, key = name.partition(".")
        if (found := getattr(getattr(config, section), key)) != wanted:
            raise InvalidInput(
                f"{name} is {found!r}, but Polar's rewards are advantages already",
                hint=f"{name}={'null' if wanted is None else wanted} (docs/bridges/areal.md has all of them)",
            )
    norm = config.actor.adv_norm
    if norm is not None and "group" in (norm.mean_level, norm.std_level):
        raise InvalidInput(
            "actor.adv_norm works on groups of a fixed number of rows, which Polar's are not",
            hint="actor.adv_norm.mean_level=batch actor.adv_norm.std_level=batch, or actor.adv_norm=null",
        )
    return PolarWorkflow(samples, config.gconfig.temperature)


def report(group: Sequence[ScoredSession]) -> None:
    """Count rewards, and what is left out, among AReaL's statistics of rollouts."""
    scope = _stats.get(_context.stat_scope())
    for session in group:
        if session.reward is not None:
            scope.scalar(reward=session.reward)
        for name, count in session.excluded.items():
            scope.scalar(**{f"polar_excluded/{name}": count})


def episode(group: Sequence[ScoredSession]) -> dict[str, Any] | None:
    """The group as tensors; None, which AReaL takes as rejected, where there is nothing to learn from.

    In a group without two different rewards all advantages are 0.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    worth = [one for found in advantages(group) for one in found]
    # AReaL puts a row's reward on its last token, and drops it where that token is not trained.
    rows = [aligned(trace).up_to_the_last_trained() for session in group for trace in session.traces]
    if not rows:
        return None

    def filled(arrays: Iterable[NDArray[Any]], filler: float = 0) -> Any:
        return pad_sequence([torch.tensor(array) for array in arrays], batch_first=True, padding_value=filler)

    return {
        "input_ids": filled(row.ids for row in rows),
        "loss_mask": filled(row.mask for row in rows).to(torch.int32),
        "logprobs": filled(row.logprobs for row in rows),
        "versions": filled((row.versions for row in rows), -1),
        "attention_mask": filled(np.ones(len(row.ids), np.bool_) for row in rows),
        "rewards": torch.tensor(worth, dtype=torch.float32),
    }
