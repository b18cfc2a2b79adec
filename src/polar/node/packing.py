"""What is made of a session once its agent is gone: traces, recording, archive. Pure work on files.

It takes long where a session was long, and much of it is Python, so that no thread would leave the event loop
alone: `workers.py` has it done in processes of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polar import plugins
from polar.errors import PolarError
from polar.gateway.capture_reader import Capture, parse_capture
from polar.models.component import Component
from polar.models.session import SessionResult, TrajectoryStats
from polar.models.trace import Trajectory
from polar.node.artifacts import Artifacts
from polar.node.failures import ModelCalls
from polar.trajectory import recording
from polar.trajectory.base import Builder

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """What is known of a session's model calls before it is scored."""

    stats: TrajectoryStats
    calls: ModelCalls
    trace_ends: tuple[str, ...]
    """For each trace, the completion whose transcript holds all of it."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A session that has ended, and where what is left of it lies."""

    capture: Path
    builder: Component
    result: SessionResult
    """Without what only its recording tells."""
    artifacts: Artifacts
    directories: tuple[tuple[Path, str], ...]
    """Directories of this machine whose files are artifacts too, with the names they get in the archive."""
    recording_path: Path
    archive_path: Path


@dataclass(frozen=True, slots=True)
class Packed:
    """A whole result, and the files that are stored with it."""

    result: SessionResult
    recording: Path | None = None
    archive: Path | None = None


def build(capture: Path, builder: Component) -> Built:
    """Read a session's capture and make its traces, of which only the numbers are handed on."""
    parsed = read_capture(capture)
    trajectory = _builder(builder).build(parsed.completions).with_faults(parsed.faults)
    return Built(trajectory.stats, ModelCalls.of(parsed.completions), tuple(_trace_ends(trajectory)))


def read_capture(path: Path) -> Capture:
    """What was captured of a session; nothing where its agent never came to its first call."""
    return parse_capture(_bytes_of(path))


def pack(packing: Packing) -> Packed:
    """Write the archive and the recording, and complete the result with what they tell."""
    packing.archive_path.parent.mkdir(parents=True, exist_ok=True)
    archive = _archive(packing)
    data = _bytes_of(packing.capture)
    result = packing.result
    try:
        trajectory = _builder(packing.builder).build_capture(data)
    except (PolarError, ValueError) as problem:
        log.exception("session %s: its capture cannot be read", result.session_id)
        trajectory = Trajectory((), ())
        told = "; ".join(filter(None, [result.error, f"its capture cannot be read: {problem}"]))
        result = result.model_copy(update={"error": told})
    if result.verdict is not None:
        trajectory = trajectory.with_reward(result.verdict.reward, result.verdict.trace_rewards)
    versions = list(_version_bounds(trajectory))
    result = result.model_copy(
        update={
            "stats": trajectory.stats,
            "policy_version_min": min(versions, default=None),
            "policy_version_max": max(versions, default=None),
            "has_recording": trajectory.stats.completions > 0,
            "has_artifacts": archive is not None,
            "warnings": tuple(packing.artifacts.problems),
        }
    )
    if not result.has_recording:
        return Packed(result, None, archive)
    packing.recording_path.write_bytes(recording.encode(data, trajectory, result))
    return Packed(result, packing.recording_path, archive)


def _builder(component: Component) -> Builder:
    builder: Builder = plugins.create("builders", "builder", component)
    return builder


def _bytes_of(capture: Path) -> bytes:
    return capture.read_bytes() if capture.exists() else b""


def _archive(packing: Packing) -> Path | None:
    """The archive of what was collected; one that cannot be made costs no session."""
    try:
        for directory, prefix in packing.directories:
            packing.artifacts.add_directory(directory, prefix)
        return packing.archive_path if packing.artifacts.write(packing.archive_path) else None
    except Exception as error:
        packing.artifacts.fail("archive", error)
        return None


def _trace_ends(trajectory: Trajectory) -> Iterator[str]:
    names = (trajectory.segments[trace.trained[-1]].completion_id for trace in trajectory.traces)
    return iter(dict.fromkeys(name for name in names if name is not None))


def _version_bounds(trajectory: Trajectory) -> Iterator[int]:
    for segment in trajectory.segments:
        if segment.policy_versions is not None and len(segment.policy_versions):
            yield int(segment.policy_versions.min())
            yield int(segment.policy_versions.max())
