"""What a step learns from: groups of sessions → advantages → packed batches; exclusions are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from polar.models.trace import Trace
from polar.training.settings import BatchSettings, Level, ObjectiveSettings, Pack
from polar.trajectory.learnable import (
    Baseline,
    EndedSession,
    Excluded,
    Group,
    baselines,
    learnable,
    trained_tokens,
)
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import Packing, TrainingRow, row
from polar.trajectory.packing.pack import pack_alone, pack_sequences, pack_trees


@dataclass(frozen=True, slots=True)
class PolicyVersions:
    """Token staleness in policy updates, including updates lost on restart or missed by engines.

    A resumed run publishes the weights of its checkpoint under a new version. By version number alone, tokens
    sampled with these very weights would be as old as all updates lost since. Engines that could not load
    weights for a while miss updates, which no version number stands for.
    """

    now: int
    """The version that engines sample with."""
    kept: int | None = None
    """The version that the weights published as `again` had before; None: no update was lost or missed."""
    again: int = 0
    """The version under which a resumed run published its weights; every later update has its own."""
    ahead: int = 0
    """Updates that no engine has loaded yet."""

    @property
    def reached(self) -> int:
        """The version that the trainer's policy would have, had engines loaded every update."""
        return self.now + self.ahead

    def after_update(self) -> PolicyVersions:
        return replace(self, ahead=self.ahead + 1)

    def after_push(self, version: int) -> PolicyVersions:
        """Engines that could not load the weights stay where they are."""
        if version == self.now:
            return self
        if self.ahead > 1:
            return PolicyVersions(version, kept=self.reached, again=version)
        return replace(self, now=version, ahead=0)

    def staleness(self, sampled: NDArray[np.integer]) -> NDArray[np.integer]:
        """The number of updates between the policy that sampled each token and the trainer's.

        A lost policy is as far away as it was ahead of the checkpoint.
        """
        if self.kept is None:
            return self.reached - sampled
        before = self.again - np.abs(sampled - self.kept)
        return self.reached - np.where(sampled < self.again, before, sampled)


@dataclass(frozen=True, slots=True)
class Material:
    """What one step learns from."""

    packing: Packing
    numbers: dict[str, float] = field(default_factory=dict)
    """Rewards and staleness of the sessions."""
    excluded: Counter[str] = field(default_factory=Counter)


def material(
    groups: Sequence[Group],
    objective: ObjectiveSettings,
    batch: BatchSettings,
    versions: PolicyVersions,
    seed: int = 0,
) -> Material:
    """The groups as packed batches for the policy of now; `seed` is the run's, for what is left to chance."""
    excluded: Counter[str] = Counter()
    credited = [
        found
        for group in groups
        for found in _credited(group, objective, batch.tokens, versions, excluded, seed)
    ]
    rewards = [s.result.reward for g in groups for s in g.samples if s.result.reward is not None]
    numbers = {"groups": float(len(groups)), "sessions": float(sum(len(group.samples) for group in groups))}
    if rewards:
        numbers |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
    if credited:
        sampled = np.concatenate([one.trace.policy_versions[one.trace.loss_mask == 1] for one in credited])
        staleness = versions.staleness(sampled)
        numbers |= {"staleness": float(staleness.mean()), "staleness_max": float(staleness.max())}
    if any(one.trace.routing is not None for one in credited):
        numbers["unrouted_tokens"] = float(sum(one.trace.unrouted_tokens for one in credited))
    scored = sum(len(group.scored) for group in groups)
    constant = 1 / (objective.session_tokens * max(1, scored))
    packing = pack(weighted_rows(credited, objective.level, constant), batch)
    return Material(packing, numbers, excluded)


def pack(rows: Iterator[TrainingRow], batch: BatchSettings) -> Packing:
    match batch.pack:
        case Pack.TREE:
            return pack_trees(rows, batch.tokens)
        case Pack.SEQUENCE:
            return pack_sequences(rows, batch.tokens)
        case Pack.ALONE:
            return pack_alone(rows, batch.tokens)


@dataclass(frozen=True, slots=True)
class Credited:
    """A trace to learn from, with only its sound tokens in the mask."""

    name: str
    session: str
    trace: Trace
    advantage: float = 0.0


def _credited(
    group: Group,
    objective: ObjectiveSettings,
    budget: int,
    versions: PolicyVersions,
    excluded: Counter[str],
    seed: int,
) -> Iterator[Credited]:
    excluded[Excluded.SESSIONS_FAILED] += len(group.samples) - len(group.scored)
    if not group.rewards_differ:
        excluded[Excluded.GROUPS_EQUAL if group.scored else Excluded.GROUPS_EMPTY] += 1
        return
    excluded[Excluded.SESSIONS_UNREADABLE] += sum(sample.recording is None for sample in group.scored)
    for sample, advantages in zip(group.scored, _advantages(group, objective, seed), strict=True):
        for index, advantage in enumerate(advantages):
            assert sample.recording is not None
            if advantage is None:
                excluded[Excluded.TRACES_EQUAL] += 1
                continue
            trajectory = sample.recording.trajectory
            whole = materialise(trajectory, trajectory.traces[index])
            if len(whole.prompt_ids) + len(whole.response_ids) > budget:
                excluded[Excluded.TRACES_OVER_BUDGET] += 1
                continue
            is_stale = versions.staleness(whole.policy_versions) > objective.max_staleness
            learnt = learnable(whole, sample.recording, objective.temperature, excluded, is_stale)
            if learnt.loss_mask.any():
                session = sample.result.session_id
                yield Credited(f"{session}/{index}", session, learnt, advantage)


def _advantages(group: Group, objective: ObjectiveSettings, seed: int) -> list[list[float | None]]:
    """The advantage of each trace of each scored session that can be read; None: nothing differs from it.

    A share of a session's reward is compared with the rewards of the group's sessions, a reward that a trace
    has of its own with the group's other such rewards.
    """
    rewards, owns = group.rewards, [_own_rewards(sample) for sample in group.scored]
    if objective.rewards == "shuffled":
        rewards, owns = _shuffled(rewards, owns, np.random.SeedSequence(seed, spawn_key=group.turn))
    named = [[reward for reward in own if reward is not None] for own in owns]
    by_trace = baselines(named, objective.advantage, objective.min_std)
    by_session = baselines([[reward] for reward in rewards], objective.advantage, objective.min_std)
    compared = zip(group.scored, rewards, owns, by_session, by_trace, strict=True)
    return [_session_advantages(*one) for one in compared]


def _shuffled(
    rewards: list[float], owns: list[list[float | None]], seed: np.random.SeedSequence
) -> tuple[list[float], list[list[float | None]]]:
    """The same rewards, those of sessions and those of traces, each dealt out among their like."""
    chance = np.random.default_rng(seed)
    named = iter(chance.permutation([own for one in owns for own in one if own is not None]).tolist())
    dealt = [[None if own is None else next(named) for own in one] for one in owns]
    return chance.permutation(rewards).tolist(), dealt


def _session_advantages(
    sample: EndedSession,
    reward: float,
    owns: Sequence[float | None],
    by_session: Baseline | None,
    by_trace: Baseline | None,
) -> list[float | None]:
    if sample.recording is None:
        return []
    found: list[float | None] = []
    for ref, own in zip(sample.recording.trajectory.traces, owns, strict=True):
        baseline, compared, share = (by_session, reward, ref.share) if own is None else (by_trace, own, 1.0)
        found.append(None if baseline is None else baseline.advantage(compared, share))
    return found


def _own_rewards(sample: EndedSession) -> list[float | None]:
    if sample.recording is None or sample.result.verdict is None:
        return []
    return sample.recording.trajectory.own_rewards(sample.result.verdict.trace_rewards)


def weighted_rows(credited: Sequence[Credited], level: Level, constant: float = 0.0) -> Iterator[TrainingRow]:
    """Rows whose weights add up to one over tokens or over sessions, unless each weight is a constant."""
    tokens: Counter[str] = Counter()
    for one in credited:
        tokens[one.session] += trained_tokens(one.trace)
    for one in credited:
        match level:
            case Level.TOKEN:
                weight = 1 / tokens.total()
            case Level.SEQUENCE:
                weight = 1 / (tokens[one.session] * len(tokens))
            case Level.CONSTANT:
                weight = constant
        yield row(one.name, one.trace, weight, one.advantage)
