"""Groups of scored sessions → advantages → packed batches; what cannot be learnt from is counted by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from polar.engines.base import PROCESSED
from polar.models.completion import Completion
from polar.models.session import SessionResult, SessionStatus
from polar.models.trace import Trace, TraceRef
from polar.training.settings import Advantage, BatchSettings, Level, ObjectiveSettings, Pack
from polar.training.versions import Versions
from polar.trajectory.exclusion import sound
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import Packing
from polar.trajectory.packing.rows import Row, row
from polar.trajectory.packing.sequences import pack_alone, pack_sequences
from polar.trajectory.packing.tree import pack_trees
from polar.trajectory.recording import Recording

ROUNDING = 1e-9
"""Rewards no further apart are equal: the same parts, added up in another order, may differ by this."""


class Excluded(StrEnum):
    """Why something that was rolled out is not learnt from; the unit is the first word."""

    GROUPS_EMPTY = "groups_empty"
    """No sample has a reward."""
    GROUPS_EQUAL = "groups_equal"
    """All samples have the same reward, or there is one only: nothing is better than anything."""
    TASKS_RESTING = "tasks_resting"
    """Their turn came, but their last group was one of those: they sit out."""
    SESSIONS_FAILED = "sessions_failed"
    """They have no reward."""
    SESSIONS_UNREADABLE = "sessions_unreadable"
    """Their recording is missing or damaged. Their rewards still count in their group."""
    TRACES_OVER_BUDGET = "traces_over_budget"
    """Longer than a forward pass may be."""
    TOKENS_UNSOUND = "tokens_unsound"
    """Their logprob is NaN, infinite or above zero by more than rounding, or nothing stands before them."""
    TOKENS_STALE = "tokens_stale"
    """Sampled by a policy too many versions ago."""
    TOKENS_SAMPLED_OTHERWISE = "tokens_sampled_otherwise"
    """At another temperature, from part of the vocabulary, biased or constrained, or by an engine whose
    logprobs are not known to be after a temperature other than 1: the trainer would compare their logprobs
    with those of another distribution."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One ended session."""

    result: SessionResult
    recording: Recording | None


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task, in the order of their numbers."""

    task_id: str
    samples: tuple[Sample, ...]

    @property
    def scored(self) -> tuple[Sample, ...]:
        """Those that are compared: they did not fail."""
        return tuple(one for one in self.samples if _is_scored(one.result))

    @property
    def rewards(self) -> list[float]:
        """Of those."""
        return [one.result.verdict.reward for one in self.scored if one.result.verdict]

    @property
    def has_spread(self) -> bool:
        """Whether any of them is better than another: else there is nothing to learn."""
        return differ(self.rewards)


def _is_scored(result: SessionResult) -> bool:
    return result.status is SessionStatus.COMPLETED and result.verdict is not None


@dataclass(frozen=True, slots=True)
class Material:
    """What one step learns from."""

    packing: Packing
    numbers: dict[str, float] = field(default_factory=dict)
    """Of the sessions: rewards, staleness."""
    excluded: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a sample's reward is compared with."""

    mean: float
    scale: float = 1.0

    def advantage(self, ref: TraceRef | Trace, reward: float) -> float:
        """Of a trace: a share of the session's reward is compared with the same share of the mean."""
        own = ref.share * reward if ref.reward is None else ref.reward
        return (own - ref.share * self.mean) / self.scale


def differ(rewards: Sequence[float]) -> bool:
    """Whether any is better than another."""
    return bool(rewards) and max(rewards) - min(rewards) > ROUNDING


def baselines(rewards: Sequence[float], kind: Advantage) -> list[Baseline] | None:
    """One for each reward; None where they are all equal."""
    if not differ(rewards):
        return None
    match kind:
        case Advantage.GROUP:
            return [Baseline(fmean(rewards), pstdev(rewards))] * len(rewards)
        case Advantage.LEAVE_ONE_OUT:
            total, others = sum(rewards), len(rewards) - 1
            return [Baseline((total - reward) / others) for reward in rewards]


def material(
    groups: Sequence[Group], objective: ObjectiveSettings, batch: BatchSettings, versions: Versions
) -> Material:
    """The groups as packed batches for the policy of now."""
    excluded: Counter[str] = Counter()
    credited = [
        found for group in groups for found in _credited(group, objective, batch.tokens, versions, excluded)
    ]
    rewards = [s.result.reward for g in groups for s in g.samples if s.result.reward is not None]
    numbers = {"groups": float(len(groups)), "sessions": float(sum(len(group.samples) for group in groups))}
    if rewards:
        numbers |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
    if credited:
        ages = np.concatenate(
            [versions.ages(one.trace.policy_versions[one.trace.loss_mask == 1]) for one in credited]
        )
        numbers |= {"staleness": float(ages.mean()), "staleness_max": float(ages.max())}
    return Material(pack(_rows(credited, objective.level), batch), numbers, excluded)


def pack(rows: Iterator[Row], batch: BatchSettings) -> Packing:
    match batch.pack:
        case Pack.TREE:
            return pack_trees(rows, batch.tokens)
        case Pack.SEQUENCE:
            return pack_sequences(rows, batch.tokens)
        case Pack.ALONE:
            return pack_alone(rows, batch.tokens)


@dataclass(frozen=True, slots=True)
class Credited:
    """A trace to learn from, only its sound tokens in the mask."""

    name: str
    session: str
    trace: Trace
    advantage: float

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.trace.loss_mask))


def _credited(
    group: Group, objective: ObjectiveSettings, budget: int, versions: Versions, excluded: Counter[str]
) -> Iterator[Credited]:
    rewards = group.rewards
    excluded[Excluded.SESSIONS_FAILED] += len(group.samples) - len(rewards)
    against = baselines(rewards, objective.advantage)
    if against is None:
        excluded[Excluded.GROUPS_EQUAL if rewards else Excluded.GROUPS_EMPTY] += 1
        return
    for sample, reward, baseline in zip(group.scored, rewards, against, strict=True):
        if sample.recording is None:
            excluded[Excluded.SESSIONS_UNREADABLE] += 1
            continue
        for index, ref in enumerate(sample.recording.trajectory.traces):
            whole = materialise(sample.recording.trajectory, ref)
            if len(whole.prompt_ids) + len(whole.response_ids) > budget:
                excluded[Excluded.TRACES_OVER_BUDGET] += 1
                continue
            sound = learnable(whole, sample.recording, objective, versions, excluded)
            if sound.loss_mask.any():
                session = sample.result.session_id
                yield Credited(f"{session}/{index}", session, sound, baseline.advantage(ref, reward))


def learnable(
    trace: Trace,
    recording: Recording,
    objective: ObjectiveSettings,
    versions: Versions,
    excluded: Counter[str],
) -> Trace:
    """The trace with only those tokens in its mask that can be learnt from."""
    kept = trace.loss_mask == 1
    logprobs = trace.logprobs
    unpredicted = np.arange(len(kept)) + len(trace.prompt_ids) == 0
    for reason, wrong in (
        (Excluded.TOKENS_UNSOUND, ~sound(logprobs) | unpredicted),
        (Excluded.TOKENS_STALE, versions.ages(trace.policy_versions) > objective.max_staleness),
        (Excluded.TOKENS_SAMPLED_OTHERWISE, sampled_otherwise(trace, recording, objective.temperature)),
    ):
        excluded[reason] += int(np.count_nonzero(kept & wrong))
        kept &= ~wrong
    return replace(
        trace, loss_mask=kept.astype(np.uint8), logprobs=np.where(kept, logprobs, 0).astype(np.float32)
    )


def sampled_otherwise(trace: Trace, recording: Recording, temperature: float) -> NDArray[np.bool_]:
    """For each response token, whether its completion was not sampled as the trainer computes logprobs."""
    mode = recording.result.logprobs_mode
    by_id = {one.id: one for one in recording.completions}
    lengths = [len(by_id[id].sampled_ids) for id in trace.completion_ids]
    otherwise = [not _as_computed(by_id[id], mode, temperature) for id in trace.completion_ids]
    found = np.zeros(len(trace.loss_mask), np.bool_)
    found[trace.loss_mask == 1] = np.repeat(otherwise, lengths)
    return found


def _as_computed(completion: Completion, logprobs_mode: str | None, temperature: float) -> bool:
    used = completion.used
    is_cut = (used.top_p is not None and used.top_p < 1.0) or (used.top_k or 0) > 0
    if is_cut or used.logit_bias or "constraint" in completion.extra:
        return False
    if logprobs_mode != PROCESSED and temperature != 1.0:
        # Before temperature, or nobody knows.
        return False
    return (1.0 if used.temperature is None else used.temperature) == temperature


def _rows(credited: Sequence[Credited], level: Level) -> Iterator[Row]:
    """Rows whose weights add up to one, over tokens or over sessions alike."""
    tokens: Counter[str] = Counter()
    for one in credited:
        tokens[one.session] += one.trained
    for one in credited:
        match level:
            case Level.TOKEN:
                weight = 1 / tokens.total()
            case Level.SEQUENCE:
                weight = 1 / (tokens[one.session] * len(tokens))
        yield row(one.name, one.trace, weight, one.advantage)
