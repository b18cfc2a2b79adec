"""Turns groups of sessions into advantages and packed batches; exclusions are counted."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from polar.models.trace import Trace, Trajectory
from polar.training.settings import BatchSettings, Level, ObjectiveSettings, Pack, TooLong
from polar.trajectory.group_tree import group_tree
from polar.trajectory.learnable import (
    Baseline,
    EndedSession,
    Excluded,
    Group,
    baselines,
    learnable,
    trained_tokens,
    truncate,
)
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import Floats, Packing, TrainingRow, row
from polar.trajectory.packing.pack import join, pack_alone, pack_sequences, pack_trees


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
    """Updates not loaded by any engine yet."""

    @property
    def reached(self) -> int:
        """The version that the trainer's policy would have, had engines loaded every update."""
        return self.now + self.ahead

    def after_update(self) -> PolicyVersions:
        return replace(self, ahead=self.ahead + 1)

    def after_push(self, version: int) -> PolicyVersions:
        """Account for a push; engines that could not load the weights keep theirs."""
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
    """The data of one step."""

    minibatches: tuple[Packing, ...]
    """Disjoint parts of the step, for an update each; one unless there are groups for more."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Rewards and staleness of the sessions."""
    excluded: Counter[str] = field(default_factory=Counter)
    versions: PolicyVersions = PolicyVersions(0)
    """What the staleness of its tokens is counted from."""
    groups: tuple[Group, ...] = ()
    """The groups that it was made of."""

    @property
    def packing(self) -> Packing:
        """All minibatches together."""
        return join(self.minibatches)


def material(
    groups: Sequence[Group],
    objective: ObjectiveSettings,
    batch: BatchSettings,
    versions: PolicyVersions,
    seed: int = 0,
    minibatches: int = 1,
) -> Material:
    """Pack the groups for the current policy, in minibatches as far as there are groups for them.

    `seed` is the run's.
    """
    excluded: Counter[str] = Counter()
    by_group = [list(_credit(group, objective, batch, versions, excluded, seed)) for group in groups]
    credited = [one for group in by_group for one in group]
    sessions = [session for group in groups for session in group.samples]
    # Branches leave where somebody chose: their rewards are not those of the policy by itself.
    own = [session.result.reward for session in sessions if not session.is_branch]
    rewards = [reward for reward in own if reward is not None]
    numbers = {"groups": float(len(groups)), "sessions": float(len(sessions))}
    if rewards:
        numbers |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
    if credited:
        sampled = np.concatenate([one.trace.policy_versions[one.trace.loss_mask == 1] for one in credited])
        staleness = versions.staleness(sampled)
        numbers |= {"staleness": float(staleness.mean()), "staleness_max": float(staleness.max())}
    if any(one.trace.routing is not None for one in credited):
        numbers["unrouted_tokens"] = float(sum(one.trace.unrouted_tokens for one in credited))
    numbers |= _branch_numbers(sessions, credited)
    parts = _deal([group for group in by_group if group], minibatches)
    scored = sum(objective.exclusion(session) is None and not session.is_branch for session in sessions)
    constant = minibatches / (objective.session_tokens * max(1, scored))
    packings = (pack(weighted_rows(part, objective.level, constant), batch) for part in parts)
    return Material(tuple(packings), numbers, excluded, versions, tuple(groups))


def _deal(groups: Sequence[list[Credited]], count: int) -> list[list[Credited]]:
    """Deal groups to as many parts as there are groups for, at least one."""
    count = max(1, min(count, len(groups)))
    return [[one for group in groups[part::count] for one in group] for part in range(count)]


def _branch_numbers(sessions: Sequence[EndedSession], credited: Sequence[Credited]) -> dict[str, float]:
    """Numbers about branches, if there are any."""
    branches = [session for session in sessions if session.is_branch]
    if not branches:
        return {}
    trained = np.concatenate([np.empty(0), *(one.trained_shares for one in credited)])
    return {
        "branches": float(len(branches)),
        "replayed_tokens": float(sum(branch.replayed_tokens for branch in branches)),
        "branched_tokens": float(np.count_nonzero(trained < 1)) / max(1, len(trained)),
    }


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
    """A trace with credit, masked to its sound tokens."""

    name: str
    sample: str
    """The unit of `level: sequence`: a session together with its branches."""
    trace: Trace
    advantages: Floats | float = 0.0
    """Per response token, or one for all."""
    shares: Floats | float = 1.0
    """Fraction as which each response token counts; after a branch point, siblings share one."""

    @property
    def trained_shares(self) -> Floats:
        mask = self.trace.loss_mask
        shares: Floats = np.full(mask.shape, self.shares, np.float32)[mask == 1]
        return shares


def _credit(
    group: Group,
    objective: ObjectiveSettings,
    batch: BatchSettings,
    versions: PolicyVersions,
    excluded: Counter[str],
    seed: int,
) -> Iterator[Credited]:
    reasons = [objective.exclusion(sample) for sample in group.samples]
    excluded.update(reason for reason in reasons if reason is not None)
    compared = [sample for sample, reason in zip(group.samples, reasons, strict=True) if reason is None]
    if not compared or not objective.learns_from(group):
        excluded[Excluded.GROUPS_EQUAL if compared else Excluded.GROUPS_EMPTY] += 1
        return
    excluded[Excluded.SESSIONS_UNREADABLE] += sum(sample.recording is None for sample in compared)
    credit = _GroupCredit(compared, objective, np.random.SeedSequence(seed, spawn_key=group.turn))
    for place, sample in enumerate(compared):
        if sample.recording is None:
            continue
        trajectory = sample.recording.trajectory
        for index, ref in enumerate(trajectory.traces):
            credits = credit.of_trace(place, index, trajectory)
            if credits is None:
                excluded[Excluded.TRACES_EQUAL] += 1
                continue
            whole = materialise(trajectory, ref)
            if is_over_budget(whole, batch):
                excluded[Excluded.TRACES_OVER_BUDGET] += 1
                continue
            is_stale = versions.staleness(whole.policy_versions) > objective.max_staleness
            learnt = learnable(whole, sample.recording, objective.temperature, excluded, is_stale)
            kept = within_budget(learnt, batch, excluded)
            if kept.loss_mask.any():
                first = compared[credit.tree.sample_of(place)].result.session_id
                lengths = [len(trajectory.segments[segment].ids) for segment in ref.trained]
                numbers: Floats = np.zeros((2, len(whole.loss_mask)), np.float32)
                numbers[:, whole.loss_mask == 1] = np.repeat(np.transpose(credits), lengths, axis=1)
                numbers = numbers[:, : len(kept.loss_mask)]
                yield Credited(f"{sample.result.session_id}/{index}", first, kept, *numbers)


def is_over_budget(trace: Trace, batch: BatchSettings) -> bool:
    """Whether a trace is too long to train anything of it."""
    least = len(trace.response_ids) if batch.overlong is TooLong.DROP else 1
    return len(trace.prompt_ids) + least > batch.tokens


def within_budget(trace: Trace, batch: BatchSettings, excluded: Counter[str]) -> Trace:
    """Cut a trace to what fits a pass, and count the trained tokens beyond."""
    kept = truncate(trace, batch.tokens - len(trace.prompt_ids))
    excluded[Excluded.TOKENS_OVER_LENGTH] += trained_tokens(trace) - trained_tokens(kept)
    return kept


class _GroupCredit:
    """The baselines of a group's sessions and traces.

    A share of a session's reward is compared with the group's sessions, or with their tree; a trace's own
    reward with the group's other such rewards.
    """

    def __init__(
        self, sessions: Sequence[EndedSession], objective: ObjectiveSettings, seed: np.random.SeedSequence
    ) -> None:
        self.tree = group_tree(sessions)
        rewards = [session.reward or 0.0 for session in sessions]
        owns = [_own_rewards(session) for session in sessions]
        if objective.rewards == "shuffled":
            rewards, owns = _shuffle_rewards(rewards, owns, seed)
        self._rewards, self._owns = rewards, owns
        named = [[reward for reward in own if reward is not None] for own in owns]
        kind, min_std = objective.comparison, objective.min_std
        self._by_trace = baselines(named, kind, min_std)
        self._by_session = baselines([[reward] for reward in rewards], kind, min_std)
        self._is_of_trees = objective.advantage.is_of_trees
        least = min_std if objective.normalise else None
        self._of_stretches = self.tree.advantages(rewards, objective.advantage, least)

    def of_trace(self, session: int, trace: int, trajectory: Trajectory) -> list[tuple[float, float]] | None:
        """Advantage and share of each completion that a trace trains; None if nothing differs from its
        own."""
        ref = trajectory.traces[trace]
        ids = (trajectory.segments[index].completion_id or "" for index in ref.trained)
        stretches = [self.tree.stretch_of(session, id) for id in ids]
        advantages = self._advantages(session, self._owns[session][trace], ref.share, stretches)
        shares = (self.tree.stretches[at].share for at in stretches)
        return None if advantages is None else list(zip(advantages, shares, strict=True))

    def _advantages(
        self, session: int, own: float | None, share: float, stretches: Sequence[int]
    ) -> list[float] | None:
        if own is not None:
            return _alike(self._by_trace[session], own, 1.0, len(stretches))
        if not self._is_of_trees:
            return _alike(self._by_session[session], self._rewards[session], share, len(stretches))
        found = self._of_stretches
        return None if found is None else [share * found[at] for at in stretches]


def _alike(baseline: Baseline | None, reward: float, share: float, count: int) -> list[float] | None:
    return None if baseline is None else [baseline.advantage(reward, share)] * count


def _shuffle_rewards(
    rewards: list[float], owns: list[list[float | None]], seed: np.random.SeedSequence
) -> tuple[list[float], list[list[float | None]]]:
    """The rewards dealt out at random, sessions' and traces' separately."""
    chance = np.random.default_rng(seed)
    named = iter(chance.permutation([own for one in owns for own in one if own is not None]).tolist())
    dealt = [[None if own is None else next(named) for own in one] for one in owns]
    return chance.permutation(rewards).tolist(), dealt


def _own_rewards(sample: EndedSession) -> list[float | None]:
    if sample.recording is None:
        return []
    verdict = sample.result.verdict
    return sample.recording.trajectory.own_rewards(verdict.trace_rewards if verdict else {})


def weighted_rows(credited: Sequence[Credited], level: Level, constant: float = 0.0) -> Iterator[TrainingRow]:
    """Rows whose weights sum to one over tokens or samples, unless each weight is constant."""
    tokens: dict[str, float] = defaultdict(float)
    for one in credited:
        tokens[one.sample] += float(one.trained_shares.sum(dtype=np.float64))
    total = sum(tokens.values())
    for one in credited:
        match level:
            case Level.TOKEN:
                weight = 1 / total
            case Level.SEQUENCE:
                weight = 1 / (tokens[one.sample] * len(tokens))
            case Level.CONSTANT:
                weight = constant
        yield row(one.name, one.trace, np.multiply(one.shares, weight), one.advantages)
