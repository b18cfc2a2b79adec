"""Three ways to train on the same sessions: what becomes a trace, and how traces share a batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polar.recordings.recording import Recording, decode
from polar.training.material import Material, PolicyVersions, material
from polar.training.settings import BatchSettings, ObjectiveSettings, Pack
from polar.trajectory.base import Builder
from polar.trajectory.learnable import EndedSession, Group
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow

OBJECTIVE = ObjectiveSettings(max_staleness=1_000_000)


@dataclass(frozen=True)
class Layout:
    """A builder and a way of packing."""

    name: str
    builder: Builder
    pack: Pack
    goal: float | None = None
    """How many times faster than the first layout it shall be."""


# Side calls are trained too, because one trace a request trains them: all three train the same tokens.
_MERGING = PrefixMerging(PrefixMerging.Options(include_auxiliary=True))
LAYOUTS = (
    Layout("per_request", PerRequest(PerRequest.Options()), Pack.SEQUENCE),
    Layout("prefix_merging", _MERGING, Pack.SEQUENCE, 5.39),
    Layout("prefix_merging + tree packing", _MERGING, Pack.TREE, 8.0),
)
ONE_A_PASS = Layout("per_request, one trace a pass", PerRequest(PerRequest.Options()), Pack.ALONE)
"""How models with linear attention train where they cannot be packed."""


def read_recordings(directory: Path) -> list[Recording]:
    return [decode(path.read_bytes()) for path in sorted(directory.rglob("*")) if path.is_file()]


def reduced(recording: Recording, calls: int, vocabulary: int | None) -> Recording:
    """The session's first model calls, for a CPU; their tokens folded into a vocabulary that is small."""
    completions = recording.completions[:calls]
    if vocabulary is not None:
        completions = tuple(
            replace(one, prompt_ids=one.prompt_ids % vocabulary, sampled_ids=one.sampled_ids % vocabulary)
            for one in completions
        )
    return replace(recording, tree=grow(completions))


def groups(recordings: Sequence[Recording], builder: Builder) -> list[Group]:
    """The sessions by task, their traces built anew."""
    found: dict[str, list[EndedSession]] = defaultdict(list)
    for one in sorted(recordings, key=lambda one: (one.result.task_id, one.result.sample)):
        built = builder.build(one.tree).with_reward(one.result.reward or 0.0)
        found[one.result.task_id].append(EndedSession(one.result, replace(one, trajectory=built)))
    return [Group(task, tuple(samples)) for task, samples in found.items()]


def laid_out(recordings: Sequence[Recording], layout: Layout, budget: int) -> Material:
    """One step's batches of so many tokens."""
    batch = BatchSettings(tokens=budget, pack=layout.pack)
    made = material(groups(recordings, layout.builder), OBJECTIVE, batch, PolicyVersions(0))
    if left_out := {name: count for name, count in made.excluded.items() if count}:
        raise SystemExit(f"{layout.name}: not all sessions can be trained: {left_out}")
    return made
