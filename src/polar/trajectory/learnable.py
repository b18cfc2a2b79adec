"""What trainers can learn from ended sessions: tokens, baselines and exclusions.

Every trainer needs this, the reference trainer and the bridges alike.
"""

from __future__ import annotations

import math
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
from polar.trajectory.accounting import sound

ROUNDING = 1e-9
"""Rewards within this are equal: the same parts may differ by it, summed in another order."""
MIN_STD = 1e-4
"""The smallest standard deviation to divide by, so that minute differences are not amplified."""


class Excluded(StrEnum):
    """Why rolled-out data is not learned from; the first word is the unit."""

    GROUPS_EMPTY = "groups_empty"
    """No sample has a reward."""
    GROUPS_EQUAL = "groups_equal"
    """All samples have the same reward, or there is only one. Traces with rewards of their own are still
    compared."""
    TASKS_RESTING = "tasks_resting"
    """Skipped, since all rewards of their last group were equal."""
    SESSIONS_FAILED = "sessions_failed"
    """They failed and have no reward."""
    SESSIONS_REPLAYED = "sessions_replayed"
    """They ended with their recording, or where they left it: their rewards say nothing about the policy."""
    SESSIONS_UNREADABLE = "sessions_unreadable"
    """Their recording is missing or damaged. Their rewards still count in their group, but those of branches
    not in its tree, since the branch point is unknown."""
    SESSIONS_UNTRAINABLE = "sessions_untrainable"
    """Nothing trainable was recorded, as `result.stats` explains. Their rewards still count."""
    TRACES_EQUAL = "traces_equal"
    """Their own reward equals all that it is compared with."""
    TRACES_OVER_BUDGET = "traces_over_budget"
    """Longer than the budget of a forward pass."""
    TOKENS_UNSOUND = "tokens_unsound"
    """Their logprob is NaN, infinite or above zero by more than rounding, or they begin a sequence."""
    TOKENS_STALE = "tokens_stale"
    """Sampled by a policy that is too many versions old."""
    TOKENS_OFF_DISTRIBUTION = "tokens_off_distribution"
    """Sampled at another temperature, truncated, biased or constrained, or by an engine whose logprobs may be
    before temperature: the trainer's logprobs would be of another distribution."""
    TOKENS_BEYOND_ONE_TRACE = "tokens_beyond_one_trace"
    """Outside the only sequence per session that the trainer takes."""
    TOKENS_UNROUTED = "tokens_unrouted"
    """In traces with unrecorded experts, while the trainer replays all."""
    TOKENS_OVER_LENGTH = "tokens_over_length"
    """Beyond the longest sequence, prompt or response that the trainer takes."""


class Advantage(StrEnum):
    """The baseline of a reward."""

    GROUP = "group"
    """The group's mean, divided by the group's standard deviation (GRPO)."""
    MEAN = "mean"
    """The group's mean (Dr. GRPO)."""
    LEAVE_ONE_OUT = "leave_one_out"
    """The mean of the group's other samples (RLOO)."""
    TREE = "tree"
    """The value of the same beginning in sibling branches: the tokens between two branch points are compared
    with those beside them."""
    TURN = "turn"
    """The value of the beginning itself: the tokens between two branch points get the difference of its
    values there. Over a session these add up to the GRPO advantage."""
    NONE = "none"
    """Nothing: rewards have no part in what is learned, and sessions need none."""

    @property
    def is_of_trees(self) -> bool:
        """Whether branch points give tokens of one session different advantages."""
        return self in (Advantage.TREE, Advantage.TURN)


@dataclass(frozen=True, slots=True)
class EndedSession:
    """The result of a session, with its recording if available."""

    result: SessionResult
    recording: Recording | None = None

    @property
    def unlearnable(self) -> Excluded | None:
        """Why nothing is learned from it, whatever its reward; None if something may be."""
        if self.result.status is not SessionStatus.COMPLETED:
            return Excluded.SESSIONS_FAILED
        return Excluded.SESSIONS_REPLAYED if self.result.agent_end is AgentEnd.REPLAYED else None

    @property
    def unscored(self) -> Excluded | None:
        """Why it is not scored; None if it is."""
        return Excluded.SESSIONS_FAILED if self.result.reward is None else self.unlearnable

    @property
    def reward(self) -> float | None:
        """The reward; None if it is not scored."""
        return self.result.reward if self.unscored is None else None

    @property
    def replayed_tokens(self) -> int:
        """Tokens sampled by another session and replayed in this one."""
        return self.result.stats.replayed_tokens

    @property
    def is_branch(self) -> bool:
        return self.replayed_tokens > 0


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one task and their branches, by number."""

    task_id: str
    samples: tuple[EndedSession, ...]
    turn: tuple[int, int] = (0, 0)
    """(round, task index) of the group."""

    @property
    def scored(self) -> tuple[EndedSession, ...]:
        """The scored sessions, which are compared."""
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples if sample.reward is not None]

    @property
    def rewards_differ(self) -> bool:
        """Whether any sample or trace is better than another; otherwise there is nothing to learn."""
        verdicts = [sample.result.verdict for sample in self.scored if sample.result.verdict]
        of_traces = [reward for verdict in verdicts for reward in verdict.trace_rewards.values()]
        return differ(self.rewards) or differ(of_traces)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The baseline of a reward."""

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
    """The baseline of each session: all rewards of the group, or those of the others.

    None if there is nothing to compare: all rewards are equal, or no other session has one. Sessions outside
    of trees use the GRPO baseline, even if `advantage` is of trees.
    """
    together = [reward for own in rewards for reward in own]
    if kind is Advantage.NONE:
        return [Baseline(0.0, math.inf)] * len(rewards)
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
    """Mask the trace to the tokens that can be learned from, and count the others. `temperature` is the
    trainer's for logprobs."""
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
    """For each response token, whether it was sampled from another distribution than the trainer's."""
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
        # Logprobs are before temperature, or unknown.
        return False
    return (1.0 if used.temperature is None else used.temperature) == temperature


def truncate(trace: Trace, response_tokens: int) -> Trace:
    """The beginning of a trace: what is left stands in the same context as before."""
    arrays = ("response_ids", "loss_mask", "logprobs", "policy_versions")
    routing = None if trace.routing is None else trace.routing[: len(trace.prompt_ids) + response_tokens]
    kept = {name: getattr(trace, name)[:response_tokens] for name in arrays}
    return replace(trace, **kept, routing=routing)


def trained_tokens(trace: Trace) -> int:
    return int(np.count_nonzero(trace.loss_mask))
