"""Results as parquet files that `datasets` and pandas read: one row a trace, one row a session."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import orjson
from pydantic import JsonValue

from polar.errors import InvalidInput, PolarError
from polar.models.session import SessionResult
from polar.models.trace import Trace
from polar.trajectory.materialise import materialise

if TYPE_CHECKING:
    import pyarrow as pa

    from polar.trajectory.recording import Recording

TRACES = "traces.parquet"
SESSIONS = "sessions.parquet"

ROWS_PER_GROUP = 4096
TOKENS_PER_GROUP = 1 << 20
"""A row group is written when either is reached: what is held in memory stays at some 30 MB."""


@dataclass(frozen=True, slots=True)
class EndedSession:
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


def export(sessions: Iterable[EndedSession], directory: Path) -> Exported:
    """Write both files; they appear under their names only when they are complete."""
    _make(directory)
    count = traces = trainable = 0
    try:
        with ExitStack() as stack:
            session_file = stack.enter_context(_ParquetFile(directory / SESSIONS, _session_schema()))
            trace_file = stack.enter_context(_ParquetFile(directory / TRACES, _trace_schema()))
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


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except FileExistsError:
        raise InvalidInput(f"{directory}: is a file, not a directory") from None
    except OSError as error:
        raise InvalidInput(f"{directory}: cannot be written: {error.strerror}") from None


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


def _session_row(session: EndedSession) -> dict[str, Any]:
    """`components`, `excluded` and `metadata` are JSON text: their keys differ from task to task."""
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
        "metadata": _json(session.metadata),
        **{f"{stage}_seconds": seconds for stage, seconds in result.seconds.model_dump().items()},
    }


def _json(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


class _ParquetFile:
    """A parquet file written a row group at a time under a temporary name, renamed when complete."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def __enter__(self) -> Self:
        import pyarrow.parquet as pq

        descriptor, part = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        os.close(descriptor)
        self._part = Path(part)
        self._writer = pq.ParquetWriter(self._part, self._schema, compression="zstd")
        return self

    def add(self, row: dict[str, Any], tokens: int) -> None:
        self._rows.append(row)
        self._tokens += tokens
        if len(self._rows) >= ROWS_PER_GROUP or self._tokens >= TOKENS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if not self._rows:
            return
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=self._schema))
        self._rows.clear()
        self._tokens = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            if kind is None:
                self._part.chmod(0o644)
                os.replace(self._part, self._path)
        finally:
            self._part.unlink(missing_ok=True)
