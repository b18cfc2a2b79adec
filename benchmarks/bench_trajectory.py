"""Building traces, and reading recordings: speed, how the cost grows with a session, and sizes."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.matching import measure
from benchmarks.report import Row, at_most, report
from polar.models.chat import FinishReason, Message, Role, Sampling, ToolCall
from polar.models.completion import Completion, Ids
from polar.models.session import SessionResult, SessionStatus, Verdict
from polar.models.trace import DriftPolicy, Trajectory
from polar.recordings.capture import CaptureWriter, parse_capture
from polar.recordings.recording import decode, encode, read_head
from polar.recordings.tree import TokenTree
from polar.trajectory.materialise import materialise
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow

SHORT, LONG = 50, 400
GIVEN, SAMPLED = 400, 100
"""Tokens a turn: a tool's result and an answer."""
VOCABULARY = 49_152
REPEATS = 15
MIN_RATE, MAX_GROWTH, MAX_BYTES, MAX_MATCHING_MS = 5.0, 1.3, 10.0, 1.0
HEADS, MAX_HEADS_S = 10_000, 2.0
BEFORE_MS, BEFORE_DRIFTED_MS, BEFORE_HEADS_S = 39.1, 101.0, 8.9
"""When a recording held its capture and grew its segments again: on the two cores, and the day, on which the
present took 18.9 and 19.4 ms."""


def session(turns: int, *, drifts: bool = False) -> tuple[list[Completion], int]:
    """Completions of one conversation, and how many different tokens they hold.

    Ids follow a Zipf law, as those of text do, and messages have as many characters as the tokens would.
    With `drifts` every prompt holds the answer before it with another last token, as chat mode may.
    """
    draw = np.random.default_rng(0)
    words = [f"{number:x}"[-4:] for number in draw.zipf(1.3, 4096)]
    completions: list[Completion] = []
    context: Ids = np.empty(0, np.int32)
    messages: tuple[Message, ...] = ()
    for turn in range(turns):
        given, sampled = (_ids(draw, count) for count in (GIVEN, SAMPLED))
        prompt = np.concatenate([context, given])
        messages += (
            Message(Role.TOOL if turn else Role.USER, _text(draw, words, GIVEN), tool_call_id="call_0"),
        )
        call = ToolCall("call_0", "shell", f'{{"command": "{_text(draw, words, SAMPLED // 2)}"}}')
        response = Message(Role.ASSISTANT, _text(draw, words, SAMPLED // 2), tool_calls=(call,))
        before = f"{turn - 1:024x}" if turn else None
        completions.append(
            Completion(
                id=f"{turn:024x}",
                index=turn,
                prompt_ids=prompt,
                sampled_ids=sampled,
                logprobs=-draw.exponential(0.5, SAMPLED).astype(np.float32),
                policy_versions=np.full(SAMPLED, turn // 100, np.int32),
                messages=messages,
                response=response,
                finish_reason=FinishReason.TOOL_CALLS,
                parent=None if drifts else before,
                follows=before,
                dialect="openai_chat",
                used=Sampling(temperature=1.0, seed=turn),
                started_at=1.7e9 + turn,
                first_token_at=1.7e9 + turn + draw.random(),
                ended_at=1.7e9 + turn + 1 + draw.random(),
            )
        )
        messages += (response,)
        context = np.concatenate([prompt, sampled])
        if drifts:
            context[-1] = VOCABULARY
    return completions, len(context)


def _ids(draw: np.random.Generator, count: int) -> Ids:
    return (draw.zipf(1.3, count) % VOCABULARY).astype(np.int32)


def _text(draw: np.random.Generator, words: Sequence[str], tokens: int) -> str:
    return " ".join(words[place] for place in draw.integers(0, len(words), tokens))


def captured(completions: Sequence[Completion]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        writer = CaptureWriter(Path(directory, "capture.log"))
        for completion in completions:
            writer.append(completion)
        writer.close()
        return writer.path.read_bytes()


def best(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of several runs: the others only add what the machine did besides."""
    taken = []
    for _ in range(REPEATS):
        gc.collect()
        start = clock()
        work()
        taken.append(clock() - start)
    return min(taken)


def traces(builder: PrefixMerging, tree: TokenTree) -> Trajectory:
    """Everything between a capture that is read and arrays that a trainer takes."""
    trajectory = builder.build(tree)
    for ref in trajectory.traces:
        materialise(trajectory, ref)
    return trajectory


def recorded(tree: TokenTree, number: int = 0) -> bytes:
    """The recording of a session with these completions."""
    trajectory = PrefixMerging(PrefixMerging.Options()).build(tree).with_reward(1.0)
    result = SessionResult(
        session_id=f"session-{number}",
        task_id=f"task-{number // 8}",
        sample=number % 8,
        attempt=1,
        status=SessionStatus.COMPLETED,
        verdict=Verdict(reward=1.0, components={"tests": 1.0}, report="12 of 12 tests pass"),
        stats=trajectory.stats,
        has_recording=True,
    )
    return encode(tree, trajectory, result)


def reading_heads() -> float:
    """Seconds for the heads of many recordings, each a file of its own."""
    completions, _ = session(10)
    data = recorded(grow(completions))
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, f"{number:05}") for number in range(HEADS)]
        for path in paths:
            path.write_bytes(data)
        start = time.perf_counter()
        for path in paths:
            assert read_head(path).task_id
        return time.perf_counter() - start


def decoding() -> list[Row]:
    """What reading a whole recording costs in processor time, beside what it cost before."""
    rows = []
    for drifts, before in ((False, BEFORE_MS), (True, BEFORE_DRIFTED_MS)):
        completions, _ = session(LONG, drifts=drifts)
        data = recorded(grow(completions))
        del completions
        taken = 1000 * best(lambda data=data: decode(data), time.process_time)  # type: ignore[misc]
        what = f"decoding a recording, {LONG} turns" + (" that all drift" if drifts else "")
        rows.append(at_most(f"{what} (before: {before:g} ms)", taken, "ms", before / 2))
    return rows


def main() -> None:
    seconds: dict[int, float] = {}
    builder = PrefixMerging(PrefixMerging.Options())
    for turns in (SHORT, LONG):
        completions, unique = session(turns)
        data = captured(completions)
        read = parse_capture(data)
        seconds[turns] = best(lambda read=read: traces(builder, read)) / unique  # type: ignore[misc]
        reading = best(lambda data=data: parse_capture(data)) / unique  # type: ignore[misc]
    rate = 1e-6 / seconds[LONG]
    rows = [
        Row(f"building, {LONG} turns", rate, "M tok/s", goal=f"≥ {MIN_RATE:g}", met=rate >= MIN_RATE),
        at_most(
            f"cost a token, {LONG} turns ÷ {SHORT} turns", seconds[LONG] / seconds[SHORT], "×", MAX_GROWTH
        ),
        at_most(f"capture, {LONG} turns", len(data) / unique, "B a token", MAX_BYTES),
        Row(f"reading the capture, {LONG} turns", 1e-6 / reading, "M tok/s"),
    ]
    drifted, unique = session(LONG, drifts=True)
    data = captured(drifted)
    read = parse_capture(data)
    realigning = PrefixMerging(PrefixMerging.Options(drift=DriftPolicy.REALIGN))
    rows += [
        at_most(f"capture, {LONG} turns that all drift", len(data) / unique, "B a token", MAX_BYTES),
        Row("building them, realigned", 1e-6 * unique / best(lambda: traces(realigning, read)), "M tok/s"),
        *decoding(),
        at_most(
            f"heads of {HEADS:,} recordings (before, decoding each: {BEFORE_HEADS_S:g} s)",
            reading_heads(),
            "s",
            MAX_HEADS_S,
        ),
    ]
    report("trajectory", rows + matching())


def matching() -> list[Row]:
    """What finding the conversation adds to a request."""
    found = measure()
    added = "added to a request at 100k tokens"
    return [
        at_most(f"{added}, {LONG} turns", found["added_ms_at_400_turns"], "ms", MAX_MATCHING_MS),
        Row(f"{added}, {SHORT} turns", found["added_ms_at_50_turns"], "ms"),
    ]


if __name__ == "__main__":
    main()
