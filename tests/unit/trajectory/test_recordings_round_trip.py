"""A recording gives back the completions and traces it was made of, and holds each token once."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.models.chat import Message, Role
from polar.models.completion import Completion
from polar.models.session import SessionResult, SessionStatus
from polar.models.trace import DriftPolicy, Trajectory
from polar.recordings import recording
from polar.recordings.capture import CaptureWriter, parse_capture
from polar.trajectory.base import Builder
from polar.trajectory.materialise import materialise
from polar.trajectory.per_request import PerRequest
from polar.trajectory.prefix_merging import Credit, PrefixMerging
from tests.captures import grow
from tests.fakes.agent_sessions import agent_sessions
from tests.fakes.sessions import completion, sessions

BUILDERS = st.just(PerRequest(PerRequest.Options())) | st.builds(
    lambda **options: PrefixMerging(PrefixMerging.Options(**options)),
    drift=st.sampled_from(DriftPolicy),
    credit=st.sampled_from(Credit),
    max_response_tokens=st.none() | st.integers(1, 30),
)


def captured(completions: list[Completion]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        writer = CaptureWriter(Path(directory) / "capture.log")
        for item in completions:
            writer.append(item)
        writer.close()
        return writer.path.read_bytes()


def encoded(completions: list[Completion], trajectory: Trajectory | None = None) -> bytes:
    tree = grow(completions)
    trajectory = trajectory or PerRequest(PerRequest.Options()).build(tree)
    result = SessionResult(
        session_id="s",
        task_id="t",
        sample=0,
        attempt=1,
        status=SessionStatus.COMPLETED,
        stats=trajectory.stats,
    )
    return recording.encode(tree, trajectory, result)


def plain(trajectory: Trajectory) -> list[dict[str, Any]]:
    made = [materialise(trajectory, ref) for ref in trajectory.traces]
    names = made[0].__slots__ if made else ()
    return [
        {
            name: value.tolist() if isinstance(value := getattr(trace, name), np.ndarray) else value
            for name in names
        }
        for trace in made
    ]


@given(sessions() | agent_sessions(), BUILDERS)
def test_a_recording_gives_back_the_traces_of_any_builder(
    completions: list[Completion], builder: Builder
) -> None:
    before = builder.build(grow(completions)).with_reward(0.25)
    after = recording.decode(encoded(completions, before)).trajectory
    assert after.stats == before.stats
    assert after.traces == before.traces
    assert plain(after) == plain(before)


@given(sessions() | agent_sessions())
def test_building_from_a_capture_is_building_from_its_completions(completions: list[Completion]) -> None:
    builder = PrefixMerging(PrefixMerging.Options())
    built = builder.build(parse_capture(captured(completions)))
    assert plain(built) == plain(builder.build(grow(completions)))


def long_session(turns: int, *, drifts: bool = False) -> tuple[list[Completion], int]:
    """Turns of 200 given and 50 sampled tokens with messages, and how many different tokens they have."""
    draw = np.random.default_rng(0)
    completions: list[Completion] = []
    context: list[int] = []
    messages: tuple[Message, ...] = ()
    for turn in range(turns):
        prompt = [*context, *draw.integers(0, 49_152, 200).tolist()]
        sampled = draw.integers(0, 49_152, 50).tolist()
        before = f"c{turn - 1}" if turn else None
        words = " ".join(map(str, prompt[-200:]))
        messages += (Message(Role.TOOL, words[:600]),)
        made = completion(turn, prompt, sampled, parent=None if drifts else before, follows=before)
        completions.append(replace(made, messages=messages))
        messages += (made.response,)
        # The next prompt holds the last token of the answer as another.
        context = [*prompt, *(sampled if not drifts else [*sampled[:-1], 7])]
    return completions, len(context)


@pytest.mark.parametrize("drifts", [False, True])
def test_a_session_of_400_turns_takes_few_bytes_a_token(drifts: bool) -> None:
    completions, unique = long_session(400, drifts=drifts)
    assert len(captured(completions)) <= 10 * unique


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: b"else" + data, lambda data: b""])
def test_damaged_bytes_are_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(recording.DamagedRecording):
        recording.decode(damage(encoded([completion(0, [1], [2])])))


def flipped(data: bytes, bit: int) -> bytes:
    at, mask = bit // 8, 1 << bit % 8
    return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def test_every_flipped_bit_of_a_recording_is_refused() -> None:
    data = encoded([completion(0, [1, 2], [3, 4]), completion(1, [1, 2, 3, 4, 5], [6], parent="c0")])
    for bit in range(8 * len(data)):
        with pytest.raises(recording.DamagedRecording):
            recording.decode(flipped(data, bit))


@given(sessions(), st.data())
def test_a_flipped_bit_of_any_recording_is_refused(
    completions: list[Completion], draw: st.DataObject
) -> None:
    data = encoded(completions)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    with pytest.raises(recording.DamagedRecording):
        recording.decode(flipped(data, bit))


def test_a_recording_of_another_version_is_named_as_such() -> None:
    data = encoded([completion(0, [1], [2])]).replace(recording.MAGIC, b"polar-recording-9\n")
    with pytest.raises(recording.DamagedRecording, match="another version"):
        recording.decode(data)


def test_the_head_tells_whose_a_recording_is_without_its_body(tmp_path: Path) -> None:
    data = encoded([completion(0, [1], [2])])
    head = data.split(b"\n")[1]
    assert orjson.loads(head.partition(b" ")[2])["result"]["session_id"] == "s"
    (tmp_path / "cut").write_bytes(data[: data.index(b"\n", len(recording.MAGIC)) + 1])
    assert recording.read_head(tmp_path / "cut") == recording.decode(data).result


def test_every_flipped_bit_of_a_head_is_refused(tmp_path: Path) -> None:
    data = encoded([completion(0, [1], [2])])
    for bit in range(8 * (data.index(b"\n", len(recording.MAGIC)) + 1)):
        with pytest.raises(recording.DamagedRecording):
            recording.read_head(io.BytesIO(flipped(data, bit)))
