"""What was captured comes back whole, each token stored once, up to the last complete record."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall, ToolDefinition
from polar.models.completion import Completion
from polar.recordings.capture import (
    MAGIC,
    CaptureError,
    CaptureUnwritable,
    CaptureWriter,
    frames,
    parse_capture,
)
from tests.captures import grow, read_capture

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda ids: np.array(ids, np.int32))
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple)
MESSAGES = st.builds(Message, st.sampled_from(Role), TEXT, st.none() | TEXT, CALLS, st.none() | TEXT)
SAMPLINGS = st.builds(
    Sampling,
    st.none() | st.floats(0, 2),
    st.none() | st.floats(0, 1),
    st.none() | st.integers(0, 100),
    st.none() | st.integers(0, 2**63 - 1),
    st.none() | st.integers(1, 100),
    st.lists(TEXT, max_size=2).map(tuple),
)
TOOLS = st.lists(st.builds(ToolDefinition, TEXT, TEXT, st.dictionaries(TEXT, TEXT, max_size=2)), max_size=2)


@st.composite
def sessions(draw: st.DrawFn) -> list[Completion]:
    """Completions of which some extend an earlier one."""
    made: list[Completion] = []
    for index in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from([None, *made]))
        prompt, messages = draw(IDS), tuple(draw(st.lists(MESSAGES, max_size=2)))
        if parent is not None:
            prompt = np.concatenate([parent.prompt_ids, parent.sampled_ids, prompt])
            messages = (*parent.messages, parent.response, *messages)
        sampled = draw(IDS)
        made.append(
            Completion(
                id=f"c{index}",
                index=index,
                prompt_ids=prompt,
                sampled_ids=sampled,
                logprobs=np.linspace(-3, 0, len(sampled), dtype=np.float32),
                policy_versions=np.full(len(sampled), index, np.int32),
                messages=messages,
                response=draw(MESSAGES),
                finish_reason=draw(st.sampled_from(FinishReason)),
                parent=parent.id if parent else None,
                tools=tuple(draw(TOOLS)),
                dialect="openai_chat",
                asked=draw(SAMPLINGS),
                used=draw(SAMPLINGS),
                started_at=1.5,
                untrainable=draw(st.none() | TEXT),
                extra=draw(st.dictionaries(TEXT, TEXT, max_size=1)),
            )
        )
    return made


def same(one: Completion, other: Completion) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(Completion)]
    return all(
        np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
        if isinstance(ours, np.ndarray)
        else ours == theirs
        for ours, theirs in pairs
    )


def write(path: Path, completions: list[Completion]) -> list[int]:
    """Write and return the file's length after each completion."""
    writer, ends = CaptureWriter(path), []
    for completion in completions:
        writer.append(completion)
        ends.append(path.stat().st_size)
    writer.close()
    return ends


@given(sessions(), st.floats(0, 1))
def test_a_capture_cut_at_any_byte_gives_every_whole_completion_and_tells_the_rest(
    completions: list[Completion], cut: float
) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "capture"
        ends = write(path, completions)
        completions = list(grow(completions).completions)
        assert all(map(same, read_capture(path), completions))
        assert len(read_capture(path)) == len(completions)
        whole = path.read_bytes()
    size = int(cut * len(whole))
    capture = parse_capture(whole[:size])
    assert len(capture.completions) == sum(end <= size for end in ends)
    assert all(map(same, capture.completions, completions))
    between_records = {len(MAGIC), *(frame.end for frame in frames(whole))}
    assert bool(capture.faults) == (size > len(MAGIC) and size not in between_records)


def completion(id: str, prompt: list[int], sampled: list[int], **changes: Any) -> Completion:
    made = Completion(
        id=id,
        index=0,
        prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32),
        logprobs=np.zeros(len(sampled), np.float32),
        policy_versions=np.zeros(len(sampled), np.int32),
        messages=(Message(Role.USER, "hi"),),
        response=Message(Role.ASSISTANT, "ho"),
        finish_reason=FinishReason.STOP,
    )
    return replace(made, **changes)


def test_a_continuation_stores_only_what_is_new(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompt, new = rng.integers(0, 49152, 5000).tolist(), rng.integers(0, 49152, 10).tolist()
    first = completion("a", prompt, [1, 2, 3])
    messages = (*first.messages, first.response, Message(Role.USER, "and?"))
    second = completion("b", [*prompt, 1, 2, 3, *new], [4], parent="a", messages=messages)
    ends = write(tmp_path / "capture", [first, second])
    assert ends[1] - ends[0] < 700
    assert same(read_capture(tmp_path / "capture")[1], replace(second, index=1))


def test_appending_after_a_torn_record_keeps_the_log_readable(tmp_path: Path) -> None:
    path = tmp_path / "capture"
    write(path, [completion("a", [1], [2]), completion("b", [1], [2])])
    path.write_bytes(path.read_bytes()[:-3])
    write(path, [completion("c", [1], [2])])
    assert [made.id for made in read_capture(path)] == ["a", "c"]


def test_damage_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    path = tmp_path / "capture"
    ends = write(path, [completion("a", [1], [2]), completion("b", [1], [2])])
    data = bytearray(path.read_bytes())
    data[ends[0] - 1] ^= 1
    path.write_bytes(data)
    fault, *_ = parse_capture(path.read_bytes()).faults
    assert "damaged" in fault.problem


def test_a_capture_that_cannot_be_begun_keeps_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda _file, _data: 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(CaptureUnwritable, match="the disk is full"):
            CaptureWriter(tmp_path / "capture")
    assert len(os.listdir("/proc/self/fd")) == before


def test_another_file_is_no_capture(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("something else entirely")
    with pytest.raises(CaptureError, match="not a capture"):
        read_capture(tmp_path / "other")
    with pytest.raises(CaptureError, match="not a capture"):
        CaptureWriter(tmp_path / "other")


def test_a_file_of_another_version_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "capture"
    path.write_bytes(b"polar-capture-1\nold")
    is_open = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CaptureError, match=r"capture: a capture of another version than \d"):
        CaptureWriter(path)
    assert path.read_bytes() == b"polar-capture-1\nold"
    assert set(os.listdir("/proc/self/fd")) == is_open
