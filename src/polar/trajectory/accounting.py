"""Where every sampled token of a session went, as the numbers of `TrajectoryStats`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from polar.models.completion import Completion
from polar.models.session import Fault, TrajectoryStats
from polar.models.trace import Segment, TraceRef
from polar.trajectory.exclusion import Exclusion, logprob_problem
from polar.trajectory.forest import Forest
from polar.trajectory.lineage import Ancestry


def path_ends(segments: Sequence[Segment]) -> list[int]:
    """For each segment, how many tokens its path has up to its end."""
    ends: list[int] = []
    for segment in segments:
        before = ends[segment.parent] if segment.parent >= 0 else 0
        ends.append(before + len(segment.ids))
    return ends


def account(
    completions: Sequence[Completion],
    forest: Forest,
    ancestry: Ancestry,
    traces: Sequence[TraceRef],
    reasons: Mapping[int, Exclusion],
    ends: Sequence[int],
    chains: int,
) -> TrajectoryStats:
    """The stats of a trajectory; `reasons` has one for every completion that is not trained."""
    segments = forest.segments
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
        drift=dict(Counter(relation.kind for relation in forest.relations if relation.kind is not None)),
        lineage=dict(Counter(ref.lineage for ref in traces)),
        auxiliary=dict(Counter(rule for rule in ancestry.rules if rule is not None)),
        omitted=dict(Counter(kind for completion in completions for kind in completion.omitted)),
        approximate_tokens=_tokens(segments, (index for index in trained if not segments[index].exact)),
        trace_tokens=trace_tokens,
        merge_ratio=sum(ends[index] for index in trained) / trace_tokens if trace_tokens else 1.0,
        faults=(*forest.faults, *_number_faults(completions, reasons)),
    )


def _tokens(segments: Sequence[Segment], indices: Iterable[int]) -> int:
    return sum(len(segments[index].ids) for index in indices)


def _number_faults(completions: Sequence[Completion], reasons: Mapping[int, Exclusion]) -> Iterable[Fault]:
    for place, reason in reasons.items():
        if reason is Exclusion.INVALID_LOGPROBS:
            problem = logprob_problem(completions[place])
            yield Fault(completion=completions[place].id, problem=problem or reason)
