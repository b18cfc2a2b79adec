"""What a trainer can learn from ended sessions: which tokens, compared with what, and why not from others.

Every trainer needs this, the reference trainer and those behind bridges alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from polar.models.completion import CONSTRAINT, Completion
from polar.models.session import PROCESSED, AgentEnd, SessionResult, SessionStatus
from polar.models.trace import Trace
from polar.recordings.recording import Recording
from polar.trajectory.accounting import Exclusion, sound

ROUNDING = 1e-9
"""Rewards no further apart are equal: the same parts, added up in another order, may differ by this."""
MIN_STD = 1e-4
"""Rewards that lie closer together than this are not blown up to advantages of 1."""


class Excluded(StrEnum):
    """Why something that was rolled out is not learnt from; the unit is the first word."""

    GROUPS_EMPTY = "groups_empty"
    """No sample has a reward."""
    GROUPS_EQUAL = "groups_equal"
    """All samples have the same reward, or there is only one: no sample is better than another. Traces with
    rewards of their own are compared all the same."""
    TASKS_RESTING = "tasks_resting"
    """Their turn came, but the rewards of their last group were all equal, so they are skipped."""
    SESSIONS_FAILED = "sessions_failed"
    """They have no reward."""
    SESSIONS_REPLAYED = "sessions_replayed"
    """They were ended where the recording that they followed ends, or where they left it: their rewards say
    nothing about the policy."""
    SESSIONS_UNREADABLE = "sessions_unreadable"
    """Their recording is missing or damaged. Their rewards still count in their group, but those of branches
    not in its tree: where they parted is not known."""
    SESSIONS_UNTRAINABLE = "sessions_untrainable"
    """Nothing trainable was recorded; `result.stats` says why. Their rewards still count."""
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
    TOKENS_BEYOND_ONE_TRACE = "tokens_beyond_one_trace"
    """The trainer takes one sequence per session, and these stand in another."""
    TOKENS_UNROUTED = "tokens_unrouted"
    """They stand in traces of which not every token's experts were recorded, and the trainer replays all."""
    TOKENS_OVER_LENGTH = "tokens_over_length"
    """They stand after the longest prompt or response that the trainer takes."""


class Advantage(StrEnum):
    """What a reward is compared with."""

    GROUP = "group"
    """The group's mean, divided by the group's standard deviation (GRPO)."""
    MEAN = "mean"
    """The group's mean, and no more (Dr. GRPO)."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the group's other samples (RLOO)."""
    TREE = "tree"
    """What the same beginning was worth in the sessions that went on from it in another way: the tokens
    between two places where sessions part are compared with those beside them."""
    TURN = "turn"
    """What the beginning was worth itself: the tokens between two places where sessions part have the value
    at the second less the value at the first. Over a session they add up to what GRPO gives all of it."""

    @property
    def is_of_trees(self) -> bool:
        """Whether tokens of one session may have different advantages, by where branches leave it."""
        return self in (Advantage.TREE, Advantage.TURN)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """The result of a session, and its recording where there is one and it was read."""

    result: SessionResult
    recording: Recording | None = None

    @property
    def unscored(self) -> Excluded | None:
        """Why it says nothing about the policy; None: it does."""
        if self.result.status is not SessionStatus.COMPLETED or self.result.reward is None:
            return Excluded.SESSIONS_FAILED
        return Excluded.SESSIONS_REPLAYED if self.result.agent_end is AgentEnd.REPLAYED else None

    @property
    def reward(self) -> float | None:
        """None where it says nothing about the policy."""
        return self.result.reward if self.unscored is None else None

    @property
    def replayed_tokens(self) -> int:
        """Tokens that another session sampled and this one was given again."""
        return self.result.stats.excluded.get(Exclusion.REPLAYED, 0)

    @property
    def is_branch(self) -> bool:
        return self.replayed_tokens > 0


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task and their branches, in the order of their numbers."""

    task_id: str
    samples: tuple[EndedSession, ...]
    turn: tuple[int, int] = (0, 0)
    """Which group of a run it is: of which round through all tasks, and of which of them."""

    @property
    def scored(self) -> tuple[EndedSession, ...]:
        """The sessions that are compared: those that say something about the policy."""
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]

    @property
    def rewards_differ(self) -> bool:
        """Whether any sample, or trace, is better than another: otherwise there is nothing to learn."""
        verdicts = [sample.result.verdict for sample in self.scored if sample.result.verdict]
        of_traces = [reward for verdict in verdicts for reward in verdict.trace_rewards.values()]
        return differ(self.rewards) or differ(of_traces)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a reward is compared with."""

    mean: float
    scale: float = 1.0

    def advantage(self, reward: float, share: float = 1.0) -> float:
        """A share of a reward is compared with the same share of the mean."""
        return share * (reward - self.mean) / self.scale


def differ(rewards: Sequence[float]) -> bool:
    return bool(rewards) and max(rewards) - min(rewards) > ROUNDING


def baselines(
    rewards: Sequence[Sequence[float]], kind: Advantage, min_std: float = MIN_STD
) -> list[Baseline | None]:
    """For each session, what its rewards are compared with: all rewards of the group, or those of the others.

    None where there is nothing to compare with: all rewards are equal, or no other session has one. What
    stands in no tree is compared as GRPO does where a tree is asked for.
    """
    together = [reward for own in rewards for reward in own]
    if not differ(together):
        return [None] * len(rewards)
    match kind:
        case Advantage.GROUP | Advantage.TREE | Advantage.TURN:
            return [Baseline(fmean(together), max(pstdev(together), min_std))] * len(rewards)
        case Advantage.MEAN:
            return [Baseline(fmean(together))] * len(rewards)
        case Advantage.LEAVE_ONE_OUT:
            return [_without(own, together) for own in rewards]


def _without(own: Sequence[float], together: Sequence[float]) -> Baseline | None:
    others = len(together) - len(own)
    return Baseline((sum(together) - sum(own)) / others) if others else None


def learnable(
    trace: Trace,
    recording: Recording,
    temperature: float,
    excluded: Counter[str],
    is_stale: NDArray[np.bool_] | None = None,
) -> Trace:
    """The trace with only those tokens in its mask that can be learnt from; the others are counted.

    `temperature` is the one at which the trainer computes logprobs.
    """
    kept = trace.loss_mask == 1
    unpredicted = np.arange(len(kept)) + len(trace.prompt_ids) == 0
    for reason, wrong in (
        (Excluded.TOKENS_UNSOUND, ~sound(trace.logprobs) | unpredicted),
        (Excluded.TOKENS_STALE, np.zeros(len(kept), np.bool_) if is_stale is None else is_stale),
        (Excluded.TOKENS_OFF_DISTRIBUTION, is_off_distribution(trace, recording, temperature)),
    ):
        excluded[reason] += int(np.count_nonzero(kept & wrong))
        kept &= ~wrong
    logprobs = np.where(kept, trace.logprobs, 0).astype(np.float32)
    return replace(trace, loss_mask=kept.astype(np.uint8), logprobs=logprobs)


def is_off_distribution(trace: Trace, recording: Recording, temperature: float) -> NDArray[np.bool_]:
    """For each response token, whether its completion was not sampled as the trainer computes logprobs."""
    mode = recording.result.logprobs_mode
    by_id = {one.id: one for one in recording.completions}
    lengths = [len(by_id[id].sampled_ids) for id in trace.completion_ids]
    is_off = [not _is_sampled_at(temperature, by_id[id], mode) for id in trace.completion_ids]
    found = np.zeros(len(trace.loss_mask), np.bool_)
    found[trace.loss_mask == 1] = np.repeat(is_off, lengths)
    return found


def _is_sampled_at(temperature: float, completion: Completion, logprobs_mode: str | None) -> bool:
    used = completion.used
    is_cut = (used.top_p is not None and used.top_p < 1.0) or (used.top_k or 0) > 0
    if is_cut or used.is_reshaped or CONSTRAINT in completion.extra:
        return False
    if logprobs_mode != PROCESSED and temperature != 1.0:
        # Logprobs from before the temperature, or nobody knows.
        return False
    return (1.0 if used.temperature is None else used.temperature) == temperature


def trained_tokens(trace: Trace) -> int:
    return int(np.count_nonzero(trace.loss_mask))
