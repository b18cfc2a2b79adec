"""A recording gives back the completions and traces it was made of, and holds each token once."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from polar.gateway.capture import CaptureWriter
from polar.models.completion import Completion
from polar.models.session import SessionResult, SessionStatus
from polar.trajectory import recording
from polar.trajectory.materialise import materialise
from polar.trajectory.per_request import PerRequest
from tests.fakes.sessions import completion, sessions


def encoded(completions: list[Completion]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "capture.log"
        writer = CaptureWriter(path)
        for item in completions:
            writer.append(item)
        writer.close()
        trajectory = PerRequest(PerRequest.Options()).build(completions).with_reward(0.25)
        result = SessionResult(
            session_id="s",
            task_id="t",
            sample=0,
            attempt=1,
            status=SessionStatus.COMPLETED,
            stats=trajectory.stats,
        )
        return recording.encode(path.read_bytes(), trajectory, result)


def truthful(completions: list[Completion]) -> list[Completion]:
    """Only completions whose claimed parent they extend, as the gateway writes them."""
    by_id = {c.id: c for c in completions}
    kept = []
    for c in completions:
        parent = by_id.get(c.parent or "")
        context = [*parent.prompt_ids.tolist(), *parent.sampled_ids.tolist()] if parent else []
        if c.prompt_ids[: len(context)].tolist() == context:
            kept.append(c)
        else:
            by_id.pop(c.id)
    return [c for c in kept if c.parent is None or c.parent in by_id]


@given(sessions())
def test_a_recording_gives_back_its_traces(completions: list[Completion]) -> None:
    completions = truthful(completions)
    before = PerRequest(PerRequest.Options()).build(completions).with_reward(0.25)
    after = recording.decode(encoded(completions)).trajectory
    assert after.stats == before.stats
    assert len(after.traces) == len(before.traces)
    for left, right in zip(before.traces, after.traces, strict=True):
        one, other = materialise(before, left), materialise(after, right)
        for field in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "policy_versions"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), field
        assert (one.reward, one.completion_ids) == (other.reward, other.completion_ids)


def test_a_long_session_takes_few_bytes_a_token() -> None:
    draw = np.random.default_rng(0)
    completions: list[Completion] = []
    context: list[int] = []
    for turn in range(60):
        prompt = [*context, *draw.integers(0, 49_152, 200).tolist()]
        sampled = draw.integers(0, 49_152, 50).tolist()
        completions.append(completion(turn, prompt, sampled, parent=f"c{turn - 1}" if turn else None))
        context = [*prompt, *sampled]
    assert len(encoded(completions)) <= 10 * len(context)


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: b"else" + data, lambda data: b""])
def test_damaged_bytes_are_refused(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(recording.DamagedRecording):
        recording.decode(damage(encoded([completion(0, [1], [2])])))
