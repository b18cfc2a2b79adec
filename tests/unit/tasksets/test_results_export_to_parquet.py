"""The parquet files say what the recordings say, in forms that pandas and datasets read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from polar.errors import InvalidInput, PolarError
from polar.models.session import SessionResult, SessionStatus
from polar.tasksets import parquet_file
from polar.tasksets.export import ExportedSession, export
from polar.trajectory.materialise import materialise
from tests.fakes.recordings import recording


def ended(session_id: str, sample: int = 0) -> ExportedSession:
    made = recording(session_id, sample=sample, reward=0.5)
    return ExportedSession(made.result, {"set": "s", "level": 2}, made)


FAILED = ExportedSession(
    SessionResult(
        session_id="s9",
        task_id="t",
        sample=0,
        attempt=3,
        status=SessionStatus.FAILED,
        error="the sandbox did not start",
    ),
    {},
    None,
)


def test_a_trace_is_a_row_with_the_very_same_arrays(tmp_path: Path) -> None:
    session = ended("s1")
    assert session.recording is not None
    trajectory = session.recording.trajectory
    written = export([session], tmp_path / "new" / "data")
    frame = pd.read_parquet(written.traces_path)
    assert (written.sessions, written.traces, len(frame)) == (1, 2, 2)
    for (_, row), ref in zip(frame.iterrows(), trajectory.traces, strict=True):
        trace = materialise(trajectory, ref)
        for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "policy_versions"):
            assert np.array_equal(row[name], getattr(trace, name))
            assert row[name].dtype == getattr(trace, name).dtype
        assert list(row["completion_ids"]) == list(trace.completion_ids)
        assert (row["session_id"], row["task_id"], row["reward"]) == ("s1", "hello-file", 0.5)
    assert frame["trace"].tolist() == [0, 1]
    assert written.trainable_tokens == trajectory.stats.trainable_tokens


def test_a_session_is_a_row_also_when_it_failed(tmp_path: Path) -> None:
    written = export([ended("s1"), FAILED], tmp_path)
    good, failed = pd.read_parquet(written.sessions_path).to_dict("records")
    assert (good["status"], good["agent_end"], good["reward"]) == ("completed", "exited", 0.5)
    assert json.loads(good["components"]) == {"exists": 0.3, "right": 0.7}
    assert json.loads(good["metadata"]) == {"set": "s", "level": 2}
    assert json.loads(good["excluded"]).keys() == {"cancelled"}
    assert good["sampled_tokens"] == good["trainable_tokens"] + json.loads(good["excluded"])["cancelled"]
    assert (good["init_seconds"], good["running_seconds"]) == (0.5, 3.25)
    assert (failed["status"], failed["error"]) == ("failed", "the sandbox did not start")
    assert pd.isna(failed["reward"])


def test_datasets_loads_both_files(tmp_path: Path) -> None:
    import datasets

    written = export([ended("s1"), FAILED, ended("s2", 1)], tmp_path / "out")
    for path, rows in ((written.traces_path, 4), (written.sessions_path, 3)):
        loaded = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert len(loaded) == rows
    traces = datasets.load_dataset(
        "parquet", data_files=str(written.traces_path), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert len(traces[0]["response_ids"]) == len(traces[0]["logprobs"]) == len(traces[0]["loss_mask"])


def test_no_results_make_empty_files_with_the_same_columns(tmp_path: Path) -> None:
    full = export([ended("s1")], tmp_path / "full")
    empty = export([], tmp_path / "empty")
    assert pq.read_schema(empty.traces_path) == pq.read_schema(full.traces_path)
    assert len(pd.read_parquet(empty.sessions_path)) == 0


def test_rows_are_written_in_bounded_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_file, "ROWS_PER_GROUP", 4)
    monkeypatch.setattr(parquet_file, "TOKENS_PER_GROUP", 1)
    written = export((ended(f"s{n}") for n in range(9)), tmp_path)
    sessions, traces = pq.ParquetFile(written.sessions_path), pq.ParquetFile(written.traces_path)
    assert [sessions.metadata.row_group(n).num_rows for n in range(sessions.num_row_groups)] == [4, 4, 1]
    assert traces.num_row_groups == 18
    assert traces.metadata.num_rows == 18


def test_a_failure_half_way_leaves_what_was_there_before(tmp_path: Path) -> None:
    export([ended("old")], tmp_path)

    def broken() -> Iterator[ExportedSession]:
        yield ended("new")
        raise PolarError("the server went away")

    with pytest.raises(PolarError, match="went away"):
        export(broken(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["sessions.parquet", "traces.parquet"]
    assert pd.read_parquet(tmp_path / "sessions.parquet")["session_id"].tolist() == ["old"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidInput, match="file: is a file, not a directory"):
        export([], tmp_path / "file")
    with pytest.raises(InvalidInput, match="cannot be written"):
        export([], tmp_path / "file" / "below")
    with pytest.raises(InvalidInput, match="cannot be written"):
        export([], Path("/proc/nowhere"))
