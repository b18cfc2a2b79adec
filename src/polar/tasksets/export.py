"""Results as parquet files that `datasets` and pandas read: one row a trace, one row a session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from pydantic import JsonValue

from polar.errors import PolarError
from polar.models.session import SessionResult
from polar.models.trace import Trace
from polar.tasksets.parquet_file import make_directory, parquet_file
from polar.trajectory.materialise import materialise

if TYPE_CHECKING:
    import pyarrow as pa

    from polar.recordings.recording import Recording

TRACES = "traces.parquet"
SESSIONS = "sessions.parquet"


@dataclass(frozen=True, slots=True)
class ExportedSession:
    """Everything the files say of one session."""

    result: SessionResult
    metadata: Mapping[str, JsonValue]
    """Of its task."""
    recording: Recording | None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and where."""

    sessions: int
    traces: int
    trainable_tokens: int
    traces_path: Path
    sessions_path: Path


def export(sessions: Iterable[ExportedSession], directory: Path) -> Exported:
    """Write both files; they appear under their names only when they are complete."""
    make_directory(directory)
    count = traces = trainable = 0
    try:
        with ExitStack() as stack:
            session_file = stack.enter_context(parquet_file(directory / SESSIONS, _session_schema()))
            trace_file = stack.enter_context(parquet_file(directory / TRACES, _trace_schema()))
            for session in sessions:
                session_file.add(_session_row(session), tokens=0)
                count += 1
                if session.recording is None:
                    continue
                trajectory = session.recording.trajectory
                for index, ref in enumerate(trajectory.traces):
                    trace = materialise(trajectory, ref)
                    trace_file.add(_trace_row(session.result, index, trace), tokens=_length(trace))
                    traces += 1
                    trainable += int(np.count_nonzero(trace.loss_mask))
    except OSError as error:
        raise PolarError(f"{directory}: cannot be written: {error.strerror or error}") from error
    return Exported(count, traces, trainable, directory / TRACES, directory / SESSIONS)


def _trace_schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("session_id", pa.string()),
            ("task_id", pa.string()),
            ("sample", pa.int32()),
            ("trace", pa.int32()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("response_ids", pa.list_(pa.int32())),
            ("loss_mask", pa.list_(pa.uint8())),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_versions", pa.list_(pa.int32())),
            ("reward", pa.float64()),
            ("status", pa.string()),
            ("model", pa.string()),
            ("logprobs_mode", pa.string()),
            ("completion_ids", pa.list_(pa.string())),
            ("lineage", pa.string()),
            ("parent", pa.int32()),
            ("approximate_from", pa.int32()),
        ]
    )


def _trace_row(result: SessionResult, index: int, trace: Trace) -> dict[str, Any]:
    return {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "sample": result.sample,
        "trace": index,
        "prompt_ids": trace.prompt_ids,
        "response_ids": trace.response_ids,
        "loss_mask": trace.loss_mask,
        "logprobs": trace.logprobs,
        "policy_versions": trace.policy_versions,
        "reward": result.reward if trace.reward is None else trace.reward,
        "status": result.status.value,
        "model": result.model,
        "logprobs_mode": result.logprobs_mode,
        "completion_ids": list(trace.completion_ids),
        "lineage": trace.lineage.value,
        "parent": trace.parent,
        "approximate_from": trace.approximate_from,
    }


def _length(trace: Trace) -> int:
    return len(trace.prompt_ids) + len(trace.response_ids)


def _session_schema() -> pa.Schema:
    import pyarrow as pa

    text, integer, number = pa.string(), pa.int64(), pa.float64()
    return pa.schema(
        [
            ("session_id", text),
            ("task_id", text),
            ("sample", pa.int32()),
            ("attempt", pa.int32()),
            ("status", text),
            ("agent_end", text),
            ("exit_code", integer),
            ("reward", number),
            ("components", text),
            ("report", text),
            ("completions", integer),
            ("traces", integer),
            ("sampled_tokens", integer),
            ("trainable_tokens", integer),
            ("excluded", text),
            ("chains", integer),
            ("trace_tokens", integer),
            ("merge_ratio", number),
            ("drift", text),
            ("faults", text),
            ("init_seconds", number),
            ("ready_seconds", number),
            ("running_seconds", number),
            ("postrun_seconds", number),
            ("policy_version_min", integer),
            ("policy_version_max", integer),
            ("harness_version", text),
            ("model", text),
            ("logprobs_mode", text),
            ("error", text),
            ("metadata", text),
        ]
    )


def _session_row(session: ExportedSession) -> dict[str, Any]:
    """`components`, `excluded`, `drift`, `faults` and `metadata` are JSON text: their keys differ."""
    result = session.result
    verdict = result.verdict
    row = result.model_dump(
        mode="json", exclude={"verdict", "stats", "seconds", "has_recording"}
    ) | result.stats.model_dump(exclude={"excluded"})
    return row | {
        "reward": result.reward,
        "components": _json(verdict.components if verdict else {}),
        "report": verdict.report if verdict else None,
        "excluded": _json(result.stats.excluded),
        "drift": _json(result.stats.drift),
        "faults": _json([fault.model_dump() for fault in result.stats.faults]),
        "metadata": _json(session.metadata),
        **{f"{stage}_seconds": seconds for stage, seconds in result.seconds.model_dump().items()},
    }


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
