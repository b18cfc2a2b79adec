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
from polar.models.trace import Trace
from polar.recordings.recording import Recording
from polar.training.settings import MIN_STD, Advantage, BatchSettings, Level, ObjectiveSettings, Pack
from polar.training.versions import Versions
from polar.trajectory.accounting import sound
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import Packing
from polar.trajectory.packing.rows import Row, row
from polar.trajectory.packing.sequences import pack_alone, pack_sequences
from polar.trajectory.packing.tree import pack_trees

ROUNDING = 1e-9
"""Rewards no further apart are equal: the same parts, added up in another order, may differ by this."""


class Excluded(StrEnum):
    """Why something that was rolled out is not learnt from; the unit is the first word."""

    GROUPS_EMPTY = "groups_empty"
    """No sample has a reward."""
    GROUPS_EQUAL = "groups_equal"
    """All samples have the same reward, or there is one only: nothing is better than anything. Traces with
    rewards of their own are compared all the same."""
    TASKS_RESTING = "tasks_resting"
    """Their turn came, but their last group was one of those: they sit out."""
    SESSIONS_FAILED = "sessions_failed"
    """They have no reward."""
    SESSIONS_UNREADABLE = "sessions_unreadable"
    """Their recording is missing or damaged. Their rewards still count in their group."""
    TRACES_EQUAL = "traces_equal"
    """Traces of a group that is learnt from whose own reward equals all that it is compared with."""
    TRACES_OVER_BUDGET = "traces_over_budget"
    """Longer than a forward pass may be."""
    TOKENS_UNSOUND = "tokens_unsound"
    """Their logprob is NaN, infinite or above zero by more than rounding, or nothing stands before them."""
    TOKENS_STALE = "tokens_stale"
    """Sampled by a policy too many versions ago."""
    TOKENS_OFF_DISTRIBUTION = "tokens_off_distribution"
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
        """The rewards of the scored samples."""
        return [one.result.verdict.reward for one in self.scored if one.result.verdict]

    @property
    def has_spread(self) -> bool:
        """Whether any sample, or trace, is better than another: else there is nothing to learn."""
        verdicts = [sample.result.verdict for sample in self.scored if sample.result.verdict]
        of_traces = [reward for verdict in verdicts for reward in verdict.trace_rewards.values()]
        return differ(self.rewards) or differ(of_traces)


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
    """What a reward is compared with."""

    mean: float
    scale: float = 1.0

    def advantage(self, reward: float, share: float = 1.0) -> float:
        """A share of a reward is compared with the same share of the mean."""
        return share * (reward - self.mean) / self.scale


def differ(rewards: Sequence[float]) -> bool:
    """Whether any is better than another."""
    return bool(rewards) and max(rewards) - min(rewards) > ROUNDING


def baselines(rewards: Sequence[float], kind: Advantage, min_std: float = MIN_STD) -> list[Baseline] | None:
    """One for each reward; None where they are all equal."""
    found = baselines_of_parts([[reward] for reward in rewards], kind, min_std)
    return None if found is None else [one for one in found if one is not None]


def baselines_of_parts(
    parts: Sequence[Sequence[float]], kind: Advantage, min_std: float = MIN_STD
) -> list[Baseline | None] | None:
    """What the parts of each session are compared with: those of the whole group, or of the other sessions.

    A session has none where no other has parts. None where all parts are equal.
    """
    together = [one for each in parts for one in each]
    if not differ(together):
        return None
    match kind:
        case Advantage.GROUP:
            return [Baseline(fmean(together), max(pstdev(together), min_std))] * len(parts)
        case Advantage.MEAN:
            return [Baseline(fmean(together))] * len(parts)
        case Advantage.LEAVE_ONE_OUT:
            return [_without(each, together) for each in parts]


def _without(own: Sequence[float], together: Sequence[float]) -> Baseline | None:
    others = len(together) - len(own)
    return Baseline((sum(together) - sum(own)) / others) if others else None


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
    scored = sum(len(group.scored) for group in groups)
    return Material(pack(_rows(credited, objective, scored), batch), numbers, excluded)


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
    excluded[Excluded.SESSIONS_FAILED] += len(group.samples) - len(group.scored)
    if not group.has_spread:
        excluded[Excluded.GROUPS_EQUAL if group.scored else Excluded.GROUPS_EMPTY] += 1
        return
    excluded[Excluded.SESSIONS_UNREADABLE] += sum(sample.recording is None for sample in group.scored)
    for sample, advantages in zip(group.scored, _advantages(group, objective), strict=True):
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
            learnt = learnable(whole, sample.recording, objective, versions, excluded)
            if learnt.loss_mask.any():
                session = sample.result.session_id
                yield Credited(f"{session}/{index}", session, learnt, advantage)


def _advantages(group: Group, objective: ObjectiveSettings) -> list[list[float | None]]:
    """The advantage of each trace of each scored session that can be read; None: nothing differs from it.

    What has a share of its session's reward is compared with the group's sessions, what has a reward of its
    own with the group's other such rewards.
    """
    owns = [_own_rewards(sample) for sample in group.scored]
    named = [[reward for reward in own if reward is not None] for own in owns]
    kind, min_std = objective.advantage, objective.min_std
    nothing: list[Baseline | None] = [None] * len(owns)
    of_traces = baselines_of_parts(named, kind, min_std) or nothing
    of_sessions = baselines_of_parts([[reward] for reward in group.rewards], kind, min_std) or nothing
    return [
        _session_advantages(*one)
        for one in zip(group.scored, group.rewards, owns, of_sessions, of_traces, strict=True)
    ]


def _session_advantages(
    sample: Sample,
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


def _own_rewards(sample: Sample) -> list[float | None]:
    if sample.recording is None or sample.result.verdict is None:
        return []
    return sample.recording.trajectory.own_rewards(sample.result.verdict.trace_rewards)


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
        (Excluded.TOKENS_OFF_DISTRIBUTION, is_off_distribution(trace, recording, objective.temperature)),
    ):
        excluded[reason] += int(np.count_nonzero(kept & wrong))
        kept &= ~wrong
    return replace(
        trace, loss_mask=kept.astype(np.uint8), logprobs=np.where(kept, logprobs, 0).astype(np.float32)
    )


def is_off_distribution(trace: Trace, recording: Recording, temperature: float) -> NDArray[np.bool_]:
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
    if is_cut or used.is_reshaped or "constraint" in completion.extra:
        return False
    if logprobs_mode != PROCESSED and temperature != 1.0:
        # Before temperature, or nobody knows.
        return False
    return (1.0 if used.temperature is None else used.temperature) == temperature


def _rows(credited: Sequence[Credited], objective: ObjectiveSettings, scored: int) -> Iterator[Row]:
    """Rows whose weights add up to one, over tokens or over sessions alike, unless each is a constant."""
    tokens: Counter[str] = Counter()
    for one in credited:
        tokens[one.session] += one.trained
    for one in credited:
        match objective.level:
            case Level.TOKEN:
                weight = 1 / tokens.total()
            case Level.SEQUENCE:
                weight = 1 / (tokens[one.session] * len(tokens))
            case Level.CONSTANT:
                weight = 1 / (objective.session_tokens * scored)
        yield row(one.name, one.trace, weight, one.advantage)
