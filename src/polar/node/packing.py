"""What is made of a session once its agent is gone: traces, recording, archive. Pure work on files.

It takes long where a session was long, and much of it is Python, so that no thread would leave the event loop
alone: `worker_processes.py` has it done in processes of its own.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from polar.config import plugins
from polar.errors import PolarError
from polar.gateway.session import without_keys
from polar.models.completion import REPLAYED, SUPERSEDED
from polar.models.component import Component
from polar.models.delivery import Delivery
from polar.models.session import MOST_BRANCH_POINTS, TrajectoryStats
from polar.models.trace import Trajectory
from polar.node.artifacts import Artifacts
from polar.node.failures import ModelCalls
from polar.recordings import recording
from polar.recordings.capture import parse_capture
from polar.recordings.tree import TokenTree
from polar.trajectory.base import Builder
from polar.trajectory.branching import BranchingStrategy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """What is known of a session's model calls before it is scored."""

    stats: TrajectoryStats
    calls: ModelCalls
    trace_ends: tuple[str, ...]
    """For each trace, the completion whose transcript holds all of it."""
    branch_at: tuple[int, ...] = ()
    """After how many of the calls branches leave the session."""
    warnings: tuple[str, ...] = ()
    """What went wrong and costs the session nothing."""


def build(capture: Path, builder: Component, branching: Component | None = None) -> Built:
    """Read a session's capture and make its traces, of which only the numbers are handed on.

    `branching` is the strategy that says where branches leave the session; None: none does.
    """
    tree = captured(capture)
    trajectory = _builder(builder).build(tree)
    branch_at, warnings = _branch_points(tree, branching) if branching else ((), ())
    calls, trace_ends = ModelCalls.of(tree.completions), tuple(_trace_ends(trajectory))
    return Built(trajectory.stats, calls, trace_ends, branch_at, warnings)


def _branch_points(tree: TokenTree, branching: Component) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """What the strategy chose, and what is wrong with it: a strategy that fails costs no session."""
    try:
        strategy: BranchingStrategy = plugins.create("branchings", "branching.at", branching)
        points = tuple(sorted(set(map(operator.index, strategy.points(tree)))))
        if points and not 0 <= points[0] <= points[-1] < len(tree.completions):
            raise ValueError(f"it chose {points} of {len(tree.completions)} model calls")
        if len(points) > MOST_BRANCH_POINTS:
            raise ValueError(f"it chose {len(points)} model calls, and {MOST_BRANCH_POINTS} are the most")
    except Exception as error:
        log.exception("branching strategy %s failed", branching.name)
        told = str(error) if isinstance(error, PolarError) else repr(error)
        return (), (without_keys(f"no branches: strategy {branching.name}: {told}"),)
    return points, ()


def captured(path: Path) -> TokenTree:
    """What was captured of a session; nothing where its agent never came to its first call."""
    return parse_capture(path.read_bytes()) if path.exists() else TokenTree()


def pack(
    delivery: Delivery,
    capture: Path,
    builder: Component,
    artifacts: Artifacts,
    directories: Sequence[tuple[Path, str]],
) -> Delivery:
    """Write the recording and the archive beside the capture, and add them to the delivery, with what they
    tell of its result.

    `directories` of this machine hold more artifacts, each with the name that it gets in the archive.
    """
    recorded, archived = capture.with_suffix(".recording"), capture.with_suffix(".zip")
    archived.parent.mkdir(parents=True, exist_ok=True)
    is_archived = _archive(archived, artifacts, directories)
    tree, result = TokenTree(), delivery.result
    try:
        tree = captured(capture)
        trajectory = _builder(builder).build(tree)
    except (PolarError, ValueError) as problem:
        log.exception("session %s: its capture cannot be read", result.session_id)
        trajectory = Trajectory((), ())
        told = "; ".join(filter(None, [result.error, f"its capture cannot be read: {problem}"]))
        result = result.model_copy(update={"error": told})
    if result.verdict is not None:
        trajectory = trajectory.with_reward(result.verdict.reward, result.verdict.trace_rewards)
    versions = list(_version_bounds(tree))
    result = result.model_copy(
        update={
            "stats": trajectory.stats,
            "policy_version_min": min(versions, default=None),
            "policy_version_max": max(versions, default=None),
            "has_recording": trajectory.stats.completions > 0,
            "has_artifacts": is_archived,
            "warnings": (*result.warnings, *artifacts.problems),
        }
    )
    if result.has_recording:
        recorded.write_bytes(recording.encode(tree, trajectory, result))
    return delivery.model_copy(
        update={
            "result": result,
            "recording": recorded if result.has_recording else None,
            "artifacts": archived if is_archived else None,
        }
    )


def _builder(component: Component) -> Builder:
    builder: Builder = plugins.create("builders", "builder", component)
    return builder


def _archive(path: Path, artifacts: Artifacts, directories: Sequence[tuple[Path, str]]) -> bool:
    """Whether there is an archive of what was collected; one that cannot be made costs no session."""
    try:
        for directory, prefix in directories:
            artifacts.add_directory(directory, prefix)
        return artifacts.write(path)
    except Exception as error:
        artifacts.fail("archive", error)
        return False


def _trace_ends(trajectory: Trajectory) -> Iterator[str]:
    names = (trajectory.segments[trace.trained[-1]].completion_id for trace in trajectory.traces)
    return iter(dict.fromkeys(name for name in names if name is not None))


def _version_bounds(tree: TokenTree) -> Iterator[int]:
    """Lowest and highest policy versions of what the session sampled itself, on the way that it went."""
    for completion in tree.completions:
        if len(completion.policy_versions) and not {REPLAYED, SUPERSEDED} & completion.extra.keys():
            yield int(completion.policy_versions.min())
            yield int(completion.policy_versions.max())
