"""What must hold of any trajectory, checked token by token in plain Python against the completions alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Sized

from polar.models.chat import FinishReason
from polar.models.completion import Completion
from polar.models.trace import Trace, Trajectory
from polar.trajectory.materialise import materialise


def context(completion: Completion) -> list[int]:
    return [*completion.prompt_ids.tolist(), *completion.sampled_ids.tolist()]


def traces(trajectory: Trajectory) -> list[Trace]:
    return [materialise(trajectory, ref) for ref in trajectory.traces]


def is_sound(completion: Completion) -> bool:
    """Whether a completion may be trained for what it is itself."""
    count = len(completion.sampled_ids)
    return (
        completion.untrainable is None
        and completion.finish_reason not in (FinishReason.CANCELLED, FinishReason.ERROR)
        and len(completion.logprobs) == count == len(completion.policy_versions)
        and all(math.isfinite(value) and value <= 1e-3 for value in completion.logprobs.tolist())
    )


def assert_exact_context(completions: Sequence[Completion], trajectory: Trajectory) -> None:
    """Invariant 1: each trained token stands after exactly what the policy saw, with its own numbers."""
    by_id = {completion.id: completion for completion in completions}
    for trace in traces(trajectory):
        tokens = [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]
        masks = [*[0] * len(trace.prompt_ids), *trace.loss_mask.tolist()]
        expected = [0] * len(tokens)
        for name in trace.completion_ids:
            completion = by_id[name]
            start, end = len(completion.prompt_ids), len(completion.prompt_ids) + len(completion.sampled_ids)
            assert tokens[:end] == context(completion), name
            expected[start:end] = [1] * (end - start)
            at = start - len(trace.prompt_ids)
            assert trace.logprobs[at : at + end - start].tolist() == completion.logprobs.tolist()
            assert (
                trace.policy_versions[at : at + end - start].tolist() == completion.policy_versions.tolist()
            )
        assert masks == expected


def assert_exactly_once(completions: Sequence[Completion], trajectory: Trajectory) -> None:
    """Invariant 2: every sampled token is trained once, or counted under one name."""
    stats = trajectory.stats
    names = Counter(name for trace in traces(trajectory) for name in trace.completion_ids)
    assert set(names.values()) <= {1}
    assert stats.completions == len(completions)
    assert stats.traces == len(trajectory.traces)
    assert stats.sampled_tokens == sum(len(completion.sampled_ids) for completion in completions)
    trained = sum(int(trace.loss_mask.sum()) for trace in traces(trajectory))
    assert stats.trainable_tokens == trained
    assert trained == sum(len(c.sampled_ids) for c in completions if c.id in names)
    assert stats.sampled_tokens == trained + sum(stats.excluded.values())


def assert_aligned(trajectory: Trajectory) -> None:
    """Invariant 3: one length, and zeros where nothing was sampled."""
    for trace in traces(trajectory):
        columns: list[Sized] = [trace.response_ids, trace.loss_mask, trace.logprobs, trace.policy_versions]
        assert len(set(map(len, columns))) == 1
        for mask, logprob, version in zip(
            trace.loss_mask.tolist(), trace.logprobs.tolist(), trace.policy_versions.tolist(), strict=True
        ):
            assert mask in (0, 1)
            if not mask:
                assert (logprob, version) == (0.0, -1)


def assert_fails_closed(completions: Sequence[Completion], trajectory: Trajectory) -> None:
    """Invariant 4: what is not sound is never trained."""
    trained = {name for trace in traces(trajectory) for name in trace.completion_ids}
    assert not [c.id for c in completions if c.id in trained and not is_sound(c)]


def assert_invariants(completions: Sequence[Completion], trajectory: Trajectory) -> None:
    assert_exact_context(completions, trajectory)
    assert_exactly_once(completions, trajectory)
    assert_aligned(trajectory)
    assert_fails_closed(completions, trajectory)
    for index, ref in enumerate(trajectory.traces):
        assert ref.parent is None or (ref.parent != index and ref.parent < len(trajectory.traces))
