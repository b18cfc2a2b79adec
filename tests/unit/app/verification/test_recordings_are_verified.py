"""Verification passes a sound session, and names what is wrong with any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from polar.app.verification import (
    Deltas,
    Uncompared,
    Verification,
    alignment_problems,
    placement_problems,
    recording_files,
    spans_of,
    summarise,
    verifications,
    verify,
    why_uncompared,
)
from polar.config import plugins
from polar.errors import InvalidInput, NotFound
from polar.models.chat import FinishReason, Sampling
from polar.models.completion import COUNTED, Completion
from polar.models.component import Component
from polar.models.session import SessionResult, SessionStatus
from polar.models.trace import Trace, TraceRef, Trajectory
from polar.recordings.recording import MAGIC, Recording
from polar.trajectory.per_request import PerRequest
from tests.captures import grow
from tests.fakes.recordings import encoded
from tests.fakes.recordings import recording as known_recording
from tests.fakes.scoring_engine import ScoringEngine, logprobs_of
from tests.fakes.sessions import completion, sessions

TOLERANCE = 1e-3


def sampled(index: int, prompt: list[int], ids: list[int], **fields: Any) -> Completion:
    return completion(index, prompt, ids, logprobs=logprobs_of([*prompt, *ids], len(prompt)), **fields)


def recording(*completions: Completion) -> Recording:
    tree = grow(completions)
    trajectory = PerRequest(PerRequest.Options()).build(tree)
    result = SessionResult(
        session_id="s",
        task_id="t",
        sample=0,
        attempt=1,
        status=SessionStatus.COMPLETED,
        stats=trajectory.stats,
        model="arithmetic",
    )
    return Recording(tree, trajectory, result)


def conversation() -> tuple[Completion, ...]:
    first = sampled(0, [1, 2, 3], [4, 5])
    second = sampled(1, [1, 2, 3, 4, 5, 6], [7, 8], parent="c0")
    return first, second, sampled(2, [9], [10], finish_reason=FinishReason.CANCELLED)


async def check(recording: Recording, engine: ScoringEngine | None = None) -> Verification:
    engine = engine or ScoringEngine()
    return await verify("s", recording, engine, engine.info, lambda _text: None)


def failure(found: Verification) -> str | None:
    return found.failure(TOLERANCE)


async def test_a_sound_session_passes_and_shared_beginnings_are_scored_once() -> None:
    engine = ScoringEngine()
    found = await check(recording(*conversation()), engine)
    assert failure(found) is None
    assert (found.sampled_tokens, found.trained_tokens, found.deltas.tokens) == (5, 4, 4)
    assert found.deltas.max < 1e-6
    assert engine.scored == [[1, 2, 3, 4, 5, 6, 7, 8]]


async def test_tokens_that_an_engine_only_counted_are_counted_alike() -> None:
    text_only = replace(completion(0, [], [], untrainable="it gives no ids"), extra={COUNTED: "5"})
    found = await verify("s", recording(text_only), None, None, lambda _text: None)
    assert found.failure(None) is None
    assert (found.sampled_tokens, found.trained_tokens) == (5, 0)


async def test_a_difference_above_the_tolerance_fails_and_says_where() -> None:
    found = await check(recording(*conversation()), ScoringEngine(error=0.01))
    assert found.deltas.max == pytest.approx(0.01, abs=1e-5)
    assert found.deltas.mean == pytest.approx(0.01, abs=1e-5)
    assert "differs by 0.01: completion c" in (failure(found) or "")
    assert found.failure(0.02) is None


async def test_a_score_that_is_no_number_fails() -> None:
    assert failure(await check(recording(*conversation()), ScoringEngine(error=float("nan")))) is not None


def test_a_session_of_which_nothing_is_compared_fails_the_whole() -> None:
    sound = Verification("a", trained_tokens=2, deltas=Deltas(2, 2e-5, 1e-5, "completion c0, token 1"))
    odd = Verification("b", trained_tokens=3, uncompared=Counter({Uncompared.CUT: 3}))
    total = summarise([sound, odd], TOLERANCE)
    assert failure(total) == "b: no token could be compared (3 cut); --no-replay checks the rest"
    assert (total.deltas.tokens, total.deltas.max, total.deltas.mean) == (2, 1e-5, 1e-5)
    assert total.deltas.worst == "a, completion c0, token 1"


@pytest.mark.parametrize("order", [(1e-6, float("nan"), 1e-5), (float("nan"), 1e-6), (1e-6, float("nan"))])
def test_no_number_hides_another_that_is_none(order: tuple[float, ...]) -> None:
    deltas = Deltas()
    for number in order:
        deltas.add(Deltas(1, number, number, "here"))
    assert failure(Verification("s", trained_tokens=3, deltas=deltas)) is not None


@pytest.mark.parametrize("builder", plugins.names("builders"))
@given(completions=sessions())
async def test_what_a_builder_makes_of_any_session_keeps_the_invariants(
    builder: str, completions: list[Completion]
) -> None:
    tree = grow(completions)
    trajectory = plugins.create("builders", "builder", Component(name=builder)).build(tree)
    result = recording().result.model_copy(update={"stats": trajectory.stats})
    made = Recording(tree, trajectory, result)
    found = await verify("s", made, None, None, lambda _text: None)
    assert found.problems == []


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        (Sampling(temperature=0.7), Uncompared.TEMPERATURE),
        (Sampling(temperature=1.0, top_p=0.9), Uncompared.CUT),
        (Sampling(temperature=1.0, top_k=20), Uncompared.CUT),
        (Sampling(temperature=1.0, logit_bias=((5, 1.0),)), Uncompared.BIASED),
        (Sampling(temperature=1.0, presence_penalty=1.0), Uncompared.BIASED),
        (Sampling(temperature=1.0, top_p=1.0, top_k=0), None),
        (Sampling(temperature=0.0), None),
        (Sampling(), None),
    ],
)
async def test_only_the_plain_distribution_is_compared(used: Sampling, reason: Uncompared | None) -> None:
    odd = replace(sampled(0, [1, 2], [3]), used=used)
    assert why_uncompared(odd, "processed_logprobs") is reason
    assert why_uncompared(odd, "raw_logprobs") is None
    found = await check(recording(odd, sampled(1, [1, 5], [6, 7])), ScoringEngine())
    assert found.uncompared == ({} if reason is None else {reason: 1})
    assert failure(found) is None


async def test_a_constrained_completion_is_not_compared() -> None:
    constrained = replace(sampled(0, [1], [2]), extra={"constraint": "json_schema"})
    assert why_uncompared(constrained, None) is Uncompared.CONSTRAINED


async def test_nothing_compared_is_no_pass() -> None:
    odd = replace(sampled(0, [1, 2], [3]), used=Sampling(temperature=0.5))
    found = await check(recording(odd))
    assert failure(found) == "no token could be compared (1 temperature); --no-replay checks the rest"
    assert found.failure(None) is None


async def test_what_fills_the_engines_context_is_counted() -> None:
    found = await check(recording(*conversation()), ScoringEngine(max_context=8))
    assert found.uncompared == {Uncompared.TOO_LONG: 2}
    assert found.deltas.tokens == 2


async def test_an_engine_that_refuses_a_session_is_a_problem_of_that_session() -> None:
    info = ScoringEngine().info
    found = await verify(
        "s", recording(*conversation()), ScoringEngine(max_context=4), info, lambda _text: None
    )
    assert failure(found) == "cannot be scored: too long"


async def test_another_model_or_version_is_noted() -> None:
    made = recording(*conversation())
    result = made.result.model_copy(update={"model": "m", "policy_version_min": 2, "policy_version_max": 3})
    found = await check(replace(made, result=result))
    assert found.notes == [
        "sampled from m, scored by arithmetic",
        "sampled with policy version 2 to 3, scored with 0",
    ]


def _trained_twice(made: Recording) -> Recording:
    trajectory = made.trajectory
    return replace(made, trajectory=replace(trajectory, traces=(*trajectory.traces, trajectory.traces[0])))


def _dropped(made: Recording) -> Recording:
    return replace(made, trajectory=replace(made.trajectory, traces=made.trajectory.traces[:1]))


def _uncounted(made: Recording) -> Recording:
    stats = made.trajectory.stats.model_copy(update={"excluded": {}})
    return replace(made, trajectory=replace(made.trajectory, stats=stats))


def _forgotten(made: Recording) -> Recording:
    return replace(made, tree=grow(made.completions[:-1]))


def _cancelled_is_trained(made: Recording) -> Recording:
    segments = made.trajectory.segments
    last = next(index for index, segment in enumerate(segments) if segment.completion_id == "c2")
    traces = (*made.trajectory.traces, TraceRef((last,)))
    return replace(made, trajectory=replace(made.trajectory, traces=traces))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_trained_twice, "completion c0 is trained 2 times"),
        (_dropped, "2 tokens are trained, but the stats say 4"),
        (_uncounted, "the stats do not add up: 5 sampled, 4 trainable, 0 excluded"),
        (_forgotten, "4 tokens were sampled, but the stats say 5"),
        (_cancelled_is_trained, "completion c2 is trained although it is excluded: cancelled"),
    ],
)
async def test_tokens_that_are_not_trained_exactly_once_are_found(
    damage: Callable[[Recording], Recording], problem: str
) -> None:
    engine = ScoringEngine()
    found = await check(damage(recording(*conversation())), engine)
    assert problem in found.problems
    assert failure(found) is not None
    assert engine.scored == [], "what is wrong already is not scored"


def _edited(made: Recording, **changes: Any) -> Recording:
    """The recording with a sampled segment that differs from what its completion says."""
    trajectory = made.trajectory
    at = trajectory.traces[0].trained[0]
    segments = list(trajectory.segments)
    segments[at] = replace(segments[at], **changes)
    return replace(made, trajectory=replace(trajectory, segments=tuple(segments)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"ids": np.array([4, 6], np.int32)},
            "trace 0: completion c0 appears with other tokens than it sampled",
        ),
        (
            {"logprobs": np.array([-1, -1], np.float32)},
            "trace 0: completion c0 appears with other logprobs or versions",
        ),
        (
            {"policy_versions": np.array([9, 9], np.int32)},
            "trace 0: completion c0 appears with other logprobs or versions",
        ),
        ({"logprobs": np.array([np.nan, -1], np.float32)}, "trace 0: a logprob is not finite"),
    ],
)
async def test_a_trace_that_is_not_its_recording_is_found(changes: dict[str, Any], problem: str) -> None:
    assert problem in (await check(_edited(recording(*conversation()), **changes))).problems


async def test_a_context_that_the_policy_did_not_see_is_found() -> None:
    made = recording(*conversation())
    segments = (replace(made.trajectory.segments[0], ids=np.array([1, 2, 4], np.int32)),)
    trajectory: Trajectory = replace(made.trajectory, segments=segments + made.trajectory.segments[1:])
    found = await check(replace(made, trajectory=trajectory))
    assert found.problems == [
        "trace 0: completion c0 follows other tokens than the policy saw",
        "trace 1: completion c1 follows other tokens than the policy saw",
    ]


def trace(**changes: Any) -> Trace:
    sound: dict[str, Any] = {
        "prompt_ids": np.array([1], np.int32),
        "response_ids": np.array([2, 3], np.int32),
        "loss_mask": np.array([0, 1], np.uint8),
        "logprobs": np.array([0, -1], np.float32),
        "policy_versions": np.array([-1, 0], np.int32),
        "reward": None,
        "completion_ids": ("c0",),
    }
    return Trace(**sound | changes)


def test_arrays_that_do_not_fit_together_are_found() -> None:
    assert list(alignment_problems(trace())) == []
    assert list(alignment_problems(trace(logprobs=np.zeros(1, np.float32)))) == [
        "ids, mask, logprobs and versions have [2, 2, 1, 2] entries"
    ]
    for wrong in (
        trace(logprobs=np.array([-1, -1], np.float32)),
        trace(policy_versions=np.array([0, 0], np.int32)),
    ):
        assert list(alignment_problems(wrong)) == ["tokens that were not sampled have logprobs or versions"]


def test_what_a_trace_itself_calls_approximate_is_no_lie() -> None:
    completions = {"c0": completion(0, [1, 9], [3], logprobs=[-1.0])}
    told, untold = trace(approximate_from=0), trace()
    assert list(placement_problems(told, spans_of(told, completions))) == []
    assert list(placement_problems(untold, spans_of(untold, completions))) == [
        "completion c0 follows other tokens than the policy saw"
    ]


def test_recordings_are_found_by_what_is_in_them(tmp_path: Path) -> None:
    data = encoded(known_recording())
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, content in {"a/one": data, "a/b/two": data, "notes.txt": b"hello"}.items():
        (tmp_path / name).write_bytes(content)
    assert recording_files(tmp_path) == [tmp_path / "a/b/two", tmp_path / "a/one"]
    assert recording_files(tmp_path / "notes.txt") == [tmp_path / "notes.txt"]
    with pytest.raises(NotFound):
        recording_files(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="no recording"):
        recording_files(tmp_path / "empty")


@pytest.mark.parametrize("bit", [0, 8 * len(MAGIC) - 8, -1])
async def test_a_flipped_bit_in_a_data_directory_is_reported(tmp_path: Path, bit: int) -> None:
    data = bytearray(encoded(known_recording()))
    data[bit // 8] ^= 1 << bit % 8
    stored = tmp_path / "recordings" / "s"
    stored.parent.mkdir()
    stored.write_bytes(data)
    assert recording_files(tmp_path) == [stored]
    [found] = [one async for one in verifications([("s", bytes(data))], None, lambda _text: None)]
    assert found.problems


async def test_a_damaged_recording_fails_and_the_others_are_still_checked() -> None:
    data = encoded(known_recording())
    given = [("bad", data[:40]), ("good", data)]
    bad, good = [one async for one in verifications(given, None, lambda _text: None)]
    assert "damaged" in bad.problems[0]
    assert good.problems == []
    total = summarise([bad, good], None)
    assert total.problems == [f"bad: {bad.problems[0]}"]
    assert total.traces == good.traces == 2
