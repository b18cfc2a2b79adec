"""AReaL: a rollout workflow whose episodes are groups of Polar sessions.

Each row of the dataset carries a task, and an episode is all sessions of its group. AReaL normalises rewards
in blocks of a fixed number of rows, which sessions with several traces or none would shift. So the `rewards`
of an episode are already advantages, and AReaL's configuration must leave them unchanged. Each session counts
once in its group, and failed sessions are not compared.

An episode is a batch with one row per trace. Mask, logprobs and versions cover prompt and response together;
shorter rows are padded on the right.
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
    align,
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

REQUIRED_CONFIG = {
    "gconfig.n_samples": 1,
    "actor.reward_norm": None,
    "actor.reward_bias": 0.0,
    "actor.reward_scaling": 1.0,
    "actor.overlong_reward_penalty": False,
    "actor.mask_no_eos_with_zero": False,
    "actor.discount": 1.0,
    "actor.gae_lambda": 1.0,
}
"""The configuration under which AReaL leaves advantages unchanged on every token of a row."""


class PolarWorkflow(_areal.RolloutWorkflow):  # type: ignore[misc,name-defined]
    """Runs one group of sessions per episode."""

    def __init__(self, samples: int, temperature: float = 1.0) -> None:
        """Make groups of `samples` sessions; the trainer computes logprobs at this temperature."""
        self._samples = samples
        self._temperature = temperature

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        orders = [Order(task_of(data), self._samples)]
        (group,) = await roll_out_groups(client_of_this_loop(), orders, self._temperature)
        report(group)
        return episode(group)


def workflow(config: Any, samples: int) -> PolarWorkflow:
    """Return the workflow for a trainer, after checking that its configuration does not normalise rewards."""
    for name, wanted in REQUIRED_CONFIG.items():
        section, _, key = name.partition(".")
        if (found := getattr(getattr(config, section), key)) != wanted:
            raise InvalidInput(
                f"{name} is {found!r}, but Polar's rewards are already advantages",
                hint=f"{name}={'null' if wanted is None else wanted} (see docs/bridges/areal.md)",
            )
    norm = config.actor.adv_norm
    if norm is not None and "group" in (norm.mean_level, norm.std_level):
        raise InvalidInput(
            "actor.adv_norm needs groups with a fixed number of rows, and Polar's vary",
            hint="actor.adv_norm.mean_level=batch actor.adv_norm.std_level=batch, or actor.adv_norm=null",
        )
    return PolarWorkflow(samples, config.gconfig.temperature)


def report(group: Sequence[ScoredSession]) -> None:
    """Add rewards and exclusions to AReaL's rollout statistics."""
    scope = _stats.get(_context.stat_scope())
    for session in group:
        if session.reward is not None:
            scope.scalar(reward=session.reward)
        for name, count in session.excluded.items():
            scope.scalar(**{f"polar_excluded/{name}": count})


def episode(group: Sequence[ScoredSession]) -> dict[str, Any] | None:
    """Return the group as tensors, or None, which AReaL takes as a rejection, if there is nothing to
    learn."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    worth = [one for found in advantages(group) for one in found]
    # AReaL puts a row's reward on its last token and drops it if that token is not trained.
    rows = [align(trace).without_untrained_tail() for session in group for trace in session.traces]
    if not rows:
        return None

    def pad(arrays: Iterable[NDArray[Any]], filler: float = 0) -> Any:
        return pad_sequence([torch.tensor(array) for array in arrays], batch_first=True, padding_value=filler)

    return {
        "input_ids": pad(row.ids for row in rows),
        "loss_mask": pad(row.mask for row in rows).to(torch.int32),
        "logprobs": pad(row.logprobs for row in rows),
        "versions": pad((row.versions for row in rows), -1),
        "attention_mask": pad(np.ones(len(row.ids), np.bool_) for row in rows),
        "rewards": torch.tensor(worth, dtype=torch.float32),
    }
