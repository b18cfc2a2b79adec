"""Sessions exported as ATIF, and read again as any reader of JSON does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from polar.models.completion import Completion
from polar.models.session import SessionResult, SessionStatus
from polar.recordings.recording import Recording
from polar.tasksets.atif import write_trajectories
from polar.tasksets.export import ExportedSession
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow


def exported(completions: list[Completion]) -> ExportedSession:
    """A session of these model calls."""
    tree = grow(completions)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(tree)
    result = SessionResult(
        session_id="s1",
        task_id="t",
        sample=0,
        attempt=1,
        status=SessionStatus.COMPLETED,
        stats=trajectory.stats,
        has_recording=True,
    )
    return ExportedSession(result, {}, Recording(tree, trajectory, result), "pi")


def written(session: ExportedSession, directory: Path) -> dict[str, Any]:
    """The session's file."""
    write_trajectories([session], directory)
    document: dict[str, Any] = json.loads((directory / f"{session.result.session_id}.json").read_text())
    return document


def documents(root: dict[str, Any]) -> list[dict[str, Any]]:
    """A trajectory and those within it."""
    return [root, *root.get("subagent_trajectories", ())]
