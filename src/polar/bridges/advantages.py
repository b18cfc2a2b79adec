"""Advantages of a group's sessions, for trainers that are given them instead of rewards."""

from __future__ import annotations

from collections.abc import Sequence

from polar.bridges.sessions import ScoredSession
from polar.training.groups import baselines
from polar.training.settings import Advantage


def advantages(group: Sequence[ScoredSession], kind: Advantage = Advantage.GROUP) -> list[list[float]]:
    """For each session, those of its traces, of each by its share of the session's reward.

    Each session counts once; one that failed is not compared.
    All are 0 where no two rewards differ: then there is nothing to learn.
    """
    against = baselines([one.reward for one in group if one.reward is not None], kind)
    if against is None:
        return [[0.0] * len(session.traces) for session in group]
    remaining = iter(against)
    found: list[list[float]] = []
    for session in group:
        if (reward := session.reward) is None:
            found.append([])
            continue
        baseline = next(remaining)
        found.append([baseline.advantage(reward, trace.share) for trace in session.traces])
    return found
