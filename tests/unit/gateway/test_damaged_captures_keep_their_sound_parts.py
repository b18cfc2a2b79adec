"""Of a capture with gaps, wrong lengths or nonsense the sound completions survive, the others are named."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.models.chat import ToolDefinition
from polar.models.completion import Completion
from polar.recordings import capture
from polar.recordings.capture import (
    MAGIC,
    CaptureError,
    CaptureWriter,
    frame,
    frames,
    opened,
    parse_capture,
)
from polar.recordings.tree import TokenTree
from polar.trajectory.prefix_merging import PrefixMerging
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.sessions import completion
from tests.fakes.trace_oracle import assert_invariants


def written(completions: list[Completion]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        writer = CaptureWriter(Path(directory) / "capture")
        for item in completions:
            writer.append(item)
        writer.close()
        return writer.path.read_bytes()


def two_conversations() -> list[Completion]:
    """c0 ← c1 ← c2, and c3 by itself."""
    return [
        completion(0, [1, 2], [3]),
        completion(1, [1, 2, 3, 4], [5], parent="c0"),
        completion(2, [1, 2, 3, 4, 5, 6], [7], parent="c1"),
        completion(3, [8, 9], [10]),
    ]


def rewritten(data: bytes, place: int, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The capture with one record changed, checksum and all."""
    pieces = [MAGIC]
    for number, part in enumerate(frames(data)):
        assert part.payload is not None
        record = opened(part.payload)
        if number == place:
            change(record.document)
        pieces.append(frame(record))
    return b"".join(pieces)


def names(capture: TokenTree) -> list[str]:
    return [made.id for made in capture.completions]


def test_a_damaged_record_costs_its_own_conversation_only() -> None:
    data = bytearray(written(two_conversations()))
    ends = [frame.end for frame in frames(bytes(data))]
    data[ends[1] - 2] ^= 0xFF
    capture = parse_capture(bytes(data))
    assert names(capture) == ["c0", "c2", "c3"]
    lost = capture.completions[1]
    assert (lost.untrainable, len(lost.prompt_ids)) == ("its context is lost", 0)
    assert [fault.completion for fault in capture.faults] == [None, "c2"]
    assert "damaged" in capture.faults[0].problem
    assert "c1" in capture.faults[1].problem
    trajectory = PrefixMerging(PrefixMerging.Options()).build(capture)
    assert trajectory.stats.trainable_tokens == 2
    assert trajectory.stats.excluded == {"untrainable": 1}
    assert trajectory.stats.faults[:2] == capture.faults


def test_every_flipped_bit_of_a_capture_is_noticed() -> None:
    data = written(two_conversations())
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            faults = parse_capture(bytes(damaged)).faults
        except CaptureError:
            continue
        assert faults, f"bit {bit}"


def test_a_damaged_length_does_not_hide_the_records_behind_it() -> None:
    data = bytearray(written(two_conversations()))
    start = len(MAGIC)
    data[start : start + 4] = b"\xff\xff\xff\x7f"
    capture = parse_capture(bytes(data))
    assert names(capture) == ["c1", "c2", "c3"]
    assert capture.completions[2].prompt_ids.tolist() == [8, 9]


def test_the_record_behind_damage_is_found_without_reading_the_rest_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = np.random.default_rng(0)
    data = bytearray(
        written([completion(place, noise.integers(0, 1 << 17, 5_000).tolist(), [1]) for place in range(200)])
    )
    data[len(MAGIC) + 20] ^= 1
    checked: list[int] = []

    def counting(payload: bytes) -> int:
        checked.append(len(payload))
        return zlib.crc32(payload)

    monkeypatch.setattr(capture, "zlib", SimpleNamespace(crc32=counting))
    parts = list(frames(bytes(data)))
    assert [part.payload is not None for part in parts] == [False] + [True] * 199
    assert sum(checked) <= 2 * len(data)


def _unknown_finish(header: dict[str, Any]) -> None:
    header["finish_reason"] = "bored"


def _no_id(header: dict[str, Any]) -> None:
    del header["response"]


def _shares_too_much(header: dict[str, Any]) -> None:
    header["shared_messages"] = 1000


@pytest.mark.parametrize("change", [_unknown_finish, _no_id, _shares_too_much])
def test_a_record_that_makes_no_sense_is_named(change: Callable[[dict[str, Any]], None]) -> None:
    capture = parse_capture(rewritten(written(two_conversations()), 1, change))
    assert names(capture) == ["c0", "c2", "c3"]
    assert capture.faults[0].completion == "c1"


def test_a_completion_recorded_twice_is_kept_once() -> None:
    first = completion(0, [1], [2])
    capture = parse_capture(written([first, replace(first, sampled_ids=np.array([3], np.int32))]))
    assert [made.sampled_ids.tolist() for made in capture.completions] == [[2]]
    assert "twice" in capture.faults[0].problem


@pytest.mark.parametrize(
    ("logprobs", "problem"),
    [
        ([-1.0, float("nan")], "token 1 is nan"),
        ([float("-inf"), -1.0], "token 0 is -inf"),
        ([0.5, -1.0], "token 0 is 0.5"),
        ([-1.0], "2 sampled tokens but 1 logprobs"),
    ],
)
def test_bad_numbers_are_named_and_the_rest_is_trained(logprobs: list[float], problem: str) -> None:
    bad = completion(0, [1], [2, 3], logprobs=logprobs)
    good = completion(1, [1, 2, 3, 4], [5], parent="c0")
    stats = PrefixMerging(PrefixMerging.Options()).build(parse_capture(written([bad, good]))).stats
    assert stats.excluded == {"invalid_logprobs": 2}
    assert stats.trainable_tokens == 1
    (fault,) = stats.faults
    assert (fault.completion, problem in fault.problem) == ("c0", True)


def test_another_version_is_told_from_another_file() -> None:
    with pytest.raises(CaptureError, match="version"):
        parse_capture(b"polar-capture-1\n1234")
    with pytest.raises(CaptureError, match="not a capture"):
        parse_capture(b"something else entirely")


def test_lost_tools_are_named() -> None:
    offered = replace(completion(0, [1], [2]), tools=(ToolDefinition("shell"),))
    data = bytearray(written([offered, completion(1, [3], [4])]))
    first = next(iter(frames(bytes(data))))
    data[first.end - 1] ^= 0xFF
    capture = parse_capture(bytes(data))
    assert names(capture) == ["c0", "c1"]
    assert [fault.completion for fault in capture.faults] == [None, "c0"]


@given(agent_sessions(max_events=8), st.data())
def test_a_capture_damaged_anywhere_yields_only_true_completions(
    completions: list[Completion], draw: st.DataObject
) -> None:
    data = bytearray(written(completions))
    for _ in range(draw.draw(st.integers(1, 3))):
        data[draw.draw(st.integers(len(MAGIC), len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    capture = parse_capture(bytes(data))
    true = {made.id: made for made in completions}
    without_context = {fault.completion for fault in capture.faults if "context is lost" in fault.problem}
    for read in capture.completions:
        assert read.sampled_ids.tolist() == true[read.id].sampled_ids.tolist()
        if read.id not in without_context:
            assert read.prompt_ids.tolist() == true[read.id].prompt_ids.tolist()
            assert read.messages == true[read.id].messages
    lost = len(completions) - len(capture.completions)
    assert not lost or capture.faults
    assert_invariants(capture.completions, PrefixMerging(PrefixMerging.Options()).build(capture))
