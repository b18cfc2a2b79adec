"""prime-rl: training samples of a group of Polar sessions, for its trainer's transport.

prime-rl's orchestrator computes advantages and packs samples for the trainer; `training_samples` stands in
its place for one group. A sample is one trace without a split: mask, logprobs, temperatures and advantages
all have the length of prompt and response together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.bridges.sessions import ScoredSession, advantages, aligned, trainer_module
from polar.models.trace import Trace
from polar.trajectory.learnable import Advantage

_prime_rl = trainer_module(
    "prime_rl.transports.rollouts.types", hint="install prime-rl as its documentation says; it is not on PyPI"
)


def training_samples(
    sessions: Sequence[ScoredSession],
    *,
    env_name: str = "polar",
    temperature: float = 1.0,
    advantage: Advantage = Advantage.GROUP,
) -> list[Any]:
    """A sample for each trace of a group's sessions.

    None where all rewards are equal: then there is nothing to learn. Sessions that failed are not compared.
    """
    worth = advantages(sessions, advantage)
    if not any(map(any, worth)):
        return []
    return [
        _sample(trace, one, env_name, temperature)
        for session, found in zip(sessions, worth, strict=True)
        for trace, one in zip(session.traces, found, strict=True)
    ]


def _sample(trace: Trace, advantage: float, env_name: str, temperature: float) -> Any:
    whole = aligned(trace)
    return _prime_rl.TrainingSample(
        token_ids=whole.ids.tolist(),
        mask=(whole.mask == 1).tolist(),
        logprobs=whole.logprobs.tolist(),
        temperatures=[temperature] * len(whole.ids),
        env_name=env_name,
        advantages=(whole.mask * advantage).tolist(),
    )
