"""prime-rl: training samples of a group of Polar sessions, for its trainer's transport.

prime-rl's orchestrator computes advantages and packs samples for the trainer; `training_samples` replaces it
for one group. A sample is a whole trace: mask, logprobs, temperatures and advantages cover prompt and
response together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.bridges.sessions import ScoredSession, advantages, align, trainer_module
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
    """Return one sample per trace of a group's sessions; none if all rewards are equal."""
    worth = advantages(sessions, advantage)
    if not any(map(any, worth)):
        return []
    return [
        _sample(trace, one, env_name, temperature)
        for session, found in zip(sessions, worth, strict=True)
        for trace, one in zip(session.traces, found, strict=True)
    ]


def _sample(trace: Trace, advantage: float, env_name: str, temperature: float) -> Any:
    whole = align(trace)
    return _prime_rl.TrainingSample(
        token_ids=whole.ids.tolist(),
        mask=(whole.mask == 1).tolist(),
        logprobs=whole.logprobs.tolist(),
        temperatures=[temperature] * len(whole.ids),
        env_name=env_name,
        advantages=(whole.mask * advantage).tolist(),
    )
