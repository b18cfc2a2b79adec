"""Accounts for every sampled token of a session: trained in a trace, or excluded for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from polar.models.chat import FinishReason
from polar.models.completion import REPLAYED, SUPERSEDED, Completion, Logprobs
from polar.models.session import REPLAYED_TOKENS, Fault, TrajectoryStats
from polar.models.trace import Segment, TraceRef
from polar.recordings.tree import TokenTree
from polar.trajectory.lineage import Ancestry


class Exclusion(StrEnum):
    """Why sampled tokens are left out of training."""

    AUXILIARY = "auxiliary"
    """A side call of the harness."""
    CANCELLED = "cancelled"
    """The client disconnected during the answer."""
    ENGINE_ERROR = "engine_error"
    """The engine failed during the answer."""
    REPLAYED = REPLAYED_TOKENS
    """Replayed from another session, which trains them."""
    SUPERSEDED_BY_RESUME = "superseded_by_resume"
    """An earlier attempt sampled them, and the one that ended the session went another way."""
    UNTRAINABLE = "untrainable"
    """The recording marks them, as the engine returned no token ids or logprobs."""
    INVALID_LOGPROBS = "invalid_logprobs"
    """Logprobs or versions are missing, of another length, not finite or above zero."""
    RETRY_SUPERSEDED = "retry_superseded"
    """The conversation continued with another answer to the same prompt."""
    REALIGNED = "realigned"
    """The conversation continued with the same answer in other tokens (drift: realign)."""
    OVER_LENGTH = "over_length"
    """The turn exceeds the length limit, together with its context."""
    UNCREDITED = "uncredited"
    """Not in the main conversation, the only credited one (credit: main)."""


LOGPROB_TOLERANCE = 1e-3
"""A logprob may exceed zero by rounding in the engine's log-softmax, not by more."""


def sound(logprobs: Logprobs) -> NDArray[np.bool_]:
    """Whether values can be logprobs: finite, and not above zero by more than rounding."""
    return np.isfinite(logprobs) & (logprobs <= LOGPROB_TOLERANCE)


def exclusion(completion: Completion) -> Exclusion | None:
    """The reason to exclude the completion by itself; None if it is trainable."""
    if REPLAYED in completion.extra:
        return Exclusion.REPLAYED
    if SUPERSEDED in completion.extra:
        return Exclusion.SUPERSEDED_BY_RESUME
    if completion.untrainable is not None:
        return Exclusion.UNTRAINABLE
    if completion.finish_reason is FinishReason.CANCELLED:
        return Exclusion.CANCELLED
    if completion.finish_reason is FinishReason.ERROR:
        return Exclusion.ENGINE_ERROR
    if logprob_problem(completion) is not None:
        return Exclusion.INVALID_LOGPROBS
    return None


def logprob_problem(completion: Completion) -> str | None:
    """Describe what is wrong with the logprobs or versions of the sampled ids; None if nothing is."""
    count, logprobs = len(completion.sampled_ids), completion.logprobs
    for name, length in (("logprobs", len(logprobs)), ("policy versions", len(completion.policy_versions))):
        if length != count:
            return f"{count} sampled tokens but {length} {name}"
    found = sound(logprobs)
    if found.all():
        return None
    first = int(np.argmin(found))
    return f"the logprob of token {first} is {logprobs[first]:g}"


def path_ends(segments: Sequence[Segment]) -> list[int]:
    """For each segment, the length of the path to its end."""
    ends: list[int] = []
    for segment in segments:
        before = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(before + len(segment.ids))
    return ends


def account(
    tree: TokenTree,
    segments: Sequence[Segment],
    ancestry: Ancestry,
    traces: Sequence[TraceRef],
    reasons: Mapping[int, Exclusion],
    chains: int,
) -> TrajectoryStats:
    """Build the stats of a trajectory; `reasons` has an entry for every completion that is not trained."""
    completions, ends = tree.completions, path_ends(segments)
    trained = [index for ref in traces for index in ref.trained]
    excluded: Counter[str] = Counter()
    for place, reason in reasons.items():
        if completions[place].sampled_tokens:
            excluded[reason] += completions[place].sampled_tokens
    trace_tokens = sum(ends[ref.trained[-1]] for ref in traces)
    return TrajectoryStats(
        completions=len(completions),
        traces=len(traces),
        sampled_tokens=sum(completion.sampled_tokens for completion in completions),
        trainable_tokens=_tokens(segments, trained),
        excluded=dict(excluded),
        chains=chains,
        drift=dict(Counter(link.kind for link in tree.links if link.kind is not None)),
        lineage=dict(Counter(ref.lineage for ref in traces)),
        auxiliary=dict(Counter(rule for rule in ancestry.rules if rule is not None)),
        omitted=dict(Counter(kind for completion in completions for kind in completion.omitted)),
        approximate_tokens=_tokens(segments, (index for index in trained if not segments[index].exact)),
        trace_tokens=trace_tokens,
        merge_ratio=sum(ends[index] for index in trained) / trace_tokens if trace_tokens else 1.0,
        faults=(*tree.faults, *_number_faults(completions, reasons)),
    )


def _tokens(segments: Sequence[Segment], indices: Iterable[int]) -> int:
    return sum(len(segments[index].ids) for index in indices)


def _number_faults(completions: Sequence[Completion], reasons: Mapping[int, Exclusion]) -> Iterable[Fault]:
    for place, reason in reasons.items():
        if reason is Exclusion.INVALID_LOGPROBS:
            problem = logprob_problem(completions[place])
            yield Fault(completion=completions[place].id, problem=problem or reason)
