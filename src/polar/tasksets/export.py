"""Results as parquet files for `datasets` and pandas: one row per trace, one row per session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from polar.models.session import SessionResult, StageSeconds
from polar.models.trace import Trace
from polar.tasksets.parquet_file import json_text, parquet_files
from polar.trajectory.materialise import materialise

if TYPE_CHECKING:
    from polar.recordings.recording import Recording

_TEXT, _INTEGER, _NUMBER, _INT32 = pa.string(), pa.int64(), pa.float64(), pa.int32()

_SESSION_COLUMNS = [("session_id", _TEXT), ("task_id", _TEXT), ("sample", _INT32), ("attempt", _INT32)]
_SESSION_COLUMNS += [("status", _TEXT), ("agent_end", _TEXT), ("exit_code", _INTEGER), ("reward", _NUMBER)]
_SESSION_COLUMNS += [("components", _TEXT), ("report", _TEXT), ("completions", _INTEGER)]
_SESSION_COLUMNS += [("traces", _INTEGER), ("sampled_tokens", _INTEGER), ("trainable_tokens", _INTEGER)]
_SESSION_COLUMNS += [("excluded", _TEXT), ("chains", _INTEGER), ("trace_tokens", _INTEGER)]
_SESSION_COLUMNS += [("merge_ratio", _NUMBER), ("drift", _TEXT), ("faults", _TEXT)]
_SESSION_COLUMNS += [(f"{stage}_seconds", _NUMBER) for stage in StageSeconds.model_fields]
_SESSION_COLUMNS += [("policy_version_min", _INTEGER), ("policy_version_max", _INTEGER)]
_SESSION_COLUMNS += [("harness_version", _TEXT), ("model", _TEXT), ("logprobs_mode", _TEXT)]
_SESSION_COLUMNS += [("error", _TEXT), ("metadata", _TEXT)]

_TRACE_COLUMNS = [("session_id", _TEXT), ("task_id", _TEXT), ("sample", _INT32), ("trace", _INT32)]
_TRACE_COLUMNS += [("prompt_ids", pa.list_(_INT32)), ("response_ids", pa.list_(_INT32))]
_TRACE_COLUMNS += [("loss_mask", pa.list_(pa.uint8())), ("logprobs", pa.list_(pa.float32()))]
_TRACE_COLUMNS += [("policy_versions", pa.list_(_INT32)), ("reward", _NUMBER), ("status", _TEXT)]
_TRACE_COLUMNS += [("model", _TEXT), ("logprobs_mode", _TEXT), ("completion_ids", pa.list_(_TEXT))]
_TRACE_COLUMNS += [("lineage", _TEXT), ("parent", _INT32), ("approximate_from", _INT32)]

_SCHEMAS = {"sessions": pa.schema(_SESSION_COLUMNS), "traces": pa.schema(_TRACE_COLUMNS)}
_OF_RESULT = ("session_id", "task_id", "sample", "status", "model", "logprobs_mode")
"""The columns of a trace that come from its session's result."""


@dataclass(frozen=True, slots=True)
class ExportedSession:
    result: SessionResult
    metadata: Mapping[str, JsonValue]
    """The metadata of its task."""
    recording: Recording | None
    harness: str = ""


@dataclass(frozen=True, slots=True)
class Exported:
    sessions: int
    traces: int
    trainable_tokens: int
    traces_path: Path
    sessions_path: Path


def export(sessions: Iterable[ExportedSession], directory: Path) -> Exported:
    """Write both files, which appear under their names only once complete."""
    trainable = 0
    with parquet_files(directory, _SCHEMAS) as files:
        for session in sessions:
            files["sessions"].add(_session_row(session), tokens=0)
            if session.recording is None:
                continue
            trajectory = session.recording.trajectory
            for index, ref in enumerate(trajectory.traces):
                trace = materialise(trajectory, ref)
                tokens = len(trace.prompt_ids) + len(trace.response_ids)
                files["traces"].add(_trace_row(session.result, index, trace), tokens)
                trainable += int(np.count_nonzero(trace.loss_mask))
    counts = files["sessions"].count, files["traces"].count
    return Exported(*counts, trainable, directory / "traces.parquet", directory / "sessions.parquet")


def _trace_row(result: SessionResult, index: int, trace: Trace) -> dict[str, Any]:
    own = [name for name in _SCHEMAS["traces"].names if name not in (*_OF_RESULT, "trace")]
    row = {name: getattr(result, name) for name in _OF_RESULT} | {name: getattr(trace, name) for name in own}
    return row | {"trace": index, "reward": result.reward if trace.reward is None else trace.reward}


def _session_row(session: ExportedSession) -> dict[str, Any]:
    """Return a row, in which values with varying keys are JSON."""
    result, stats, verdict = session.result, session.result.stats, session.result.verdict
    return {
        **result.model_dump(mode="json", exclude={"verdict", "stats", "seconds", "has_recording"}),
        **stats.model_dump(exclude={"excluded"}),
        "reward": result.reward,
        "components": json_text(verdict.components if verdict else {}),
        "report": verdict.report if verdict else None,
        "excluded": json_text(stats.excluded),
        "drift": json_text(stats.drift),
        "faults": json_text([fault.model_dump() for fault in stats.faults]),
        "metadata": json_text(session.metadata),
        **{f"{stage}_seconds": seconds for stage, seconds in result.seconds},
    }
