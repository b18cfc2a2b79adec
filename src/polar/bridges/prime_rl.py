"""prime-rl: training samples of a group of Polar sessions, for its trainer's transport.

prime-rl's orchestrator computes advantages and sends batches of samples to the trainer; `training_samples`
stands in its place for one group. A sample is one trace without a split: mask, logprobs, temperatures and
advantages all have the length of prompt and response together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.bridges.packages import trainer_module
from polar.bridges.sequences import aligned
from polar.bridges.sessions import ScoredSession
from polar.training.groups import Baseline, baselines
from polar.training.settings import Advantage

_prime_rl = trainer_module(
    "prime_rl.transport.types", hint="install prime-rl as its documentation says; it is not on PyPI"
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
    scored = [(session, session.reward) for session in sessions if session.reward is not None]
    against = baselines([reward for _, reward in scored], advantage)
    if against is None:
        return []
    return [
        sample
        for (session, reward), baseline in zip(scored, against, strict=True)
        for sample in _samples(session, reward, baseline, env_name, temperature)
    ]


def _samples(
    session: ScoredSession, reward: float, baseline: Baseline, env_name: str, temperature: float
) -> list[Any]:
    made = []
    for trace in session.traces:
        whole = aligned(trace)
        made.append(
            _prime_rl.TrainingSample(
                token_ids=whole.ids.tolist(),
                mask=(whole.mask == 1).tolist(),
                logprobs=whole.logprobs.tolist(),
                temperatures=[temperature] * len(whole.ids),
                env_name=env_name,
                reward=trace.reward,
                advantages=(whole.mask * baseline.advantage(reward, trace.share)).tolist(),
            )
        )
    return made
