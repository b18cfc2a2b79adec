"""Checks recordings against the invariants, and their logprobs against an engine.

An engine scores at temperature 1 without truncation. Recorded logprobs are from the distribution that was
sampled from, so completions sampled differently are not compared, and are counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polar.app.stack import Say, connect_engine
from polar.config.settings import Settings
from polar.engines.base import Engine, EngineDown, EngineError, ModelInfo
from polar.errors import InvalidInput, NotFound
from polar.models.completion import CONSTRAINT, Completion, Ids
from polar.models.session import RAW
from polar.models.trace import Trace
from polar.recordings.recording import DamagedRecording, Recording, decode, is_recording
from polar.store.blobs import RECORDINGS
from polar.trajectory.accounting import exclusion
from polar.trajectory.materialise import materialise

GREEDY_BELOW = 1e-5
"""Below this temperature the likeliest token is taken, and engines report its logprob at temperature 1."""


class Uncompared(StrEnum):
    """Why the logprob of a trained token cannot be compared with an engine's score."""

    TEMPERATURE = "temperature"
    """Sampled at a temperature other than 1."""
    CUT = "cut"
    """Sampled from only the likeliest tokens (top_p, top_k)."""
    BIASED = "biased"
    """Sampled with logit biases or penalties."""
    CONSTRAINED = "constrained"
    """Sampled under a grammar."""
    APPROXIMATE = "approximate"
    """The trace itself marks the token as following others than the policy saw."""
    TOO_LONG = "too_long"
    """The engine needs room for one token after those it scores."""


@dataclass(slots=True)
class Deltas:
    """|Δ logprob| over compared tokens."""

    tokens: int = 0
    total: float = 0.0
    max: float = 0.0
    worst: str | None = None

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else 0.0

    def add(self, other: Deltas) -> None:
        # Comparisons with NaN are False, so that a NaN replaces a number and stays.
        if self.worst is None or not (other.max <= self.max or math.isnan(self.max)):
            self.max, self.worst = other.max, other.worst
        self.tokens += other.tokens
        self.total += other.total


@dataclass(slots=True)
class Verification:
    """The findings of one session, or of several together."""

    name: str
    traces: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    deltas: Deltas = field(default_factory=Deltas)
    uncompared: Counter[str] = field(default_factory=Counter)
    """Trained tokens that could not be compared, by reason."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def failure(self, tolerance: float | None) -> str | None:
        """Return why this does not pass, or None. Without a tolerance, logprobs were not compared."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            return self.problems[0] + more
        if tolerance is None or not self.trained_tokens:
            return None
        if not self.deltas.tokens:
            return (
                f"no token could be compared ({format_counts(self.uncompared)}); --no-replay checks the rest"
            )
        # NaN must fail.
        if not self.deltas.max <= tolerance:
            return f"a logprob differs by {self.deltas.max:.3g}: {self.deltas.worst}"
        return None

    def document(self, tolerance: float | None) -> dict[str, Any]:
        """Return the findings as JSON; numbers of a comparison that did not happen are null."""
        failure = self.failure(tolerance)
        found = asdict(self) | {"passed": failure is None, "failure": failure}
        deltas = self.deltas
        largest, mean = (deltas.max, deltas.mean) if deltas.tokens else (None, None)
        numbers = {"max": largest, "mean": mean, "tokens": deltas.tokens, "worst": deltas.worst}
        return {name: value for name, value in found.items() if name != "deltas"} | {"delta_logprob": numbers}


def summarise(done: Sequence[Verification], tolerance: float | None) -> Verification:
    """Combine all sessions; the problems say which of them do not pass, and why."""
    total = Verification(f"{len(done)} sessions")
    for one in done:
        total.traces += one.traces
        total.sampled_tokens += one.sampled_tokens
        total.trained_tokens += one.trained_tokens
        total.uncompared += one.uncompared
        if one.deltas.tokens:
            total.deltas.add(replace(one.deltas, worst=f"{one.name}, {one.deltas.worst}"))
        if failure := one.failure(tolerance):
            total.problems.append(f"{one.name}: {failure}")
    return total


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The tokens that one completion sampled, within a trace."""

    completion: Completion
    start: int
    """Position of its first sampled token, counted from the start of the trace's prompt."""
    is_exact: bool
    """Whether the trace does not mark its context as different from what the policy saw."""

    @property
    def end(self) -> int:
        return self.start + len(self.completion.sampled_ids)


async def verifications(
    recordings: Iterable[tuple[str, bytes]],
    settings_for: Callable[[str | None], Settings] | None,
    say: Say,
) -> AsyncGenerator[Verification, None]:
    """Yield the findings of each recording, under the given name, scored by the configured engine.

    The engine is connected or started with the settings for the model of the first recording. Without
    settings, only the invariants are checked.
    """
    async with AsyncExitStack() as parts:
        engine = model = None
        for name, data in recordings:
            try:
                recording = decode(data)
            except DamagedRecording as error:
                yield Verification(name, problems=[error.message])
                continue
            if settings_for is not None and engine is None:
                settings = settings_for(recording.result.model)
                engine = await parts.enter_async_context(connect_engine(settings, say))
                model = await engine.model_info()
            yield await verify(name, recording, engine, model, say)


async def verify(
    name: str, recording: Recording, engine: Engine | None, model: ModelInfo | None, say: Say
) -> Verification:
    """Check one session's invariants and, with an engine, score its traces again."""
    stats = recording.trajectory.stats
    found = Verification(name, stats.traces, stats.sampled_tokens, stats.trainable_tokens)
    traces = [materialise(recording.trajectory, ref) for ref in recording.trajectory.traces]
    found.problems += accounting_problems(recording, traces)
    completions = {completion.id: completion for completion in recording.completions}
    placed: list[tuple[Ids, list[Span]]] = []
    for number, trace in enumerate(traces):
        found.problems += [f"trace {number}: {problem}" for problem in alignment_problems(trace)]
        spans = spans_of(trace, completions)
        found.problems += [f"trace {number}: {problem}" for problem in placement_problems(trace, spans)]
        placed.append((np.concatenate([trace.prompt_ids, trace.response_ids]), spans))
    if engine is not None and model is not None and not found.problems:
        found.notes += _other_policy(recording, model)
        try:
            await _replay(found, placed, recording.result.logprobs_mode, engine, model, say)
        except EngineDown:
            raise
        except EngineError as error:
            found.problems.append(f"cannot be scored: {error}")
    return found


def accounting_problems(recording: Recording, traces: Sequence[Trace]) -> Iterator[str]:
    """Yield sampled tokens that are neither trained in exactly one trace nor counted under a reason."""
    stats = recording.trajectory.stats
    sampled = sum(completion.sampled_tokens for completion in recording.completions)
    if stats.sampled_tokens != sampled:
        yield f"{sampled} tokens were sampled, but the stats say {stats.sampled_tokens}"
    if stats.sampled_tokens != stats.trainable_tokens + sum(stats.excluded.values()):
        yield (
            f"the stats do not add up: {stats.sampled_tokens} sampled, {stats.trainable_tokens} trainable,"
            f" {sum(stats.excluded.values())} excluded"
        )
    trained = sum(int(trace.loss_mask.sum()) for trace in traces)
    if stats.trainable_tokens != trained:
        yield f"{trained} tokens are trained, but the stats say {stats.trainable_tokens}"
    times = Counter(name for trace in traces for name in trace.completion_ids)
    for completion in recording.completions:
        if times[completion.id] > 1:
            yield f"completion {completion.id} is trained {times[completion.id]} times"
        if times[completion.id] and (reason := exclusion(completion)) is not None:
            yield f"completion {completion.id} is trained although it is excluded: {reason}"


def alignment_problems(trace: Trace) -> Iterator[str]:
    lengths = [
        len(array) for array in (trace.response_ids, trace.loss_mask, trace.logprobs, trace.policy_versions)
    ]
    if len(set(lengths)) > 1:
        yield f"ids, mask, logprobs and versions have {lengths} entries"
        return
    given = trace.loss_mask == 0
    if trace.logprobs[given].any() or (trace.policy_versions[given] != -1).any():
        yield "tokens that were not sampled have logprobs or versions"
    if not np.isfinite(trace.logprobs).all():
        yield "a logprob is not finite"
    tokens = len(trace.prompt_ids) + len(trace.response_ids)
    if trace.routing is not None and len(trace.routing) != tokens:
        yield f"the experts of {len(trace.routing)} out of {tokens} tokens are known"


def spans_of(trace: Trace, completions: Mapping[str, Completion]) -> list[Span]:
    """Return the place in a trace of each completion that it trains, from the mask."""
    at = np.flatnonzero(trace.loss_mask) + len(trace.prompt_ids)
    limit = np.inf if trace.approximate_from is None else len(trace.prompt_ids) + trace.approximate_from
    spans: list[Span] = []
    used = 0
    for name in trace.completion_ids:
        if used < len(at):
            spans.append(Span(completions[name], int(at[used]), bool(at[used] < limit)))
        used += len(completions[name].sampled_ids)
    return spans


def placement_problems(trace: Trace, spans: Sequence[Span]) -> Iterator[str]:
    """Yield trained tokens that differ from what was sampled, or follow other tokens than the policy saw."""
    ids = np.concatenate([trace.prompt_ids, trace.response_ids])
    if int(trace.loss_mask.sum()) != sum(len(span.completion.sampled_ids) for span in spans):
        yield "its mask does not cover exactly what its completions sampled"
        return
    for span in spans:
        completion = span.completion
        part = slice(span.start - len(trace.prompt_ids), span.end - len(trace.prompt_ids))
        if not np.array_equal(ids[span.start : span.end], completion.sampled_ids):
            yield f"completion {completion.id} appears with other tokens than it sampled"
        elif not (
            np.array_equal(trace.logprobs[part], completion.logprobs)
            and np.array_equal(trace.policy_versions[part], completion.policy_versions)
        ):
            yield f"completion {completion.id} appears with other logprobs or versions"
        elif span.is_exact and not np.array_equal(ids[: span.start], completion.prompt_ids):
            yield f"completion {completion.id} follows other tokens than the policy saw"


def why_uncompared(completion: Completion, logprobs_mode: str | None) -> Uncompared | None:
    """Return why a completion's logprobs differ from an engine's scores, or None."""
    used = completion.used
    if logprobs_mode == RAW:
        return None
    if CONSTRAINT in completion.extra:
        return Uncompared.CONSTRAINED
    if used.is_reshaped:
        return Uncompared.BIASED
    if used.temperature is not None and used.temperature != 1.0 and used.temperature >= GREEDY_BELOW:
        return Uncompared.TEMPERATURE
    if (used.top_p is not None and used.top_p < 1.0) or (used.top_k or 0) > 0:
        return Uncompared.CUT
    return None


async def _replay(
    found: Verification,
    placed: Sequence[tuple[Ids, list[Span]]],
    logprobs_mode: str | None,
    engine: Engine,
    model: ModelInfo,
    say: Say,
) -> None:
    for number, (ids, spans) in enumerate(paths := longest_traces(placed)):
        wanted: list[Span] = []
        for span in spans:
            reason = why_uncompared(span.completion, logprobs_mode)
            if not span.is_exact:
                reason = Uncompared.APPROXIMATE
            elif reason is None and span.end >= model.max_context:
                reason = Uncompared.TOO_LONG
            if reason is None:
                wanted.append(span)
            else:
                found.uncompared[reason] += span.end - span.start
        if not wanted:
            continue
        end = max(span.end for span in wanted)
        say(f"{found.name}: {end} tokens, {number + 1} of {len(paths)}")
        scores = np.array(await engine.score(ids[:end].tolist()), np.float64)
        for span in wanted:
            found.deltas.add(_compare(span, scores))


def longest_traces(placed: Sequence[tuple[Ids, list[Span]]]) -> list[tuple[Ids, list[Span]]]:
    """Return the traces that no other begins with, each with the spans of those it begins with.

    Scoring a trace scores all its prefixes: ten turns that extend each other take one forward pass.
    """
    # As big-endian bytes, a trace sorts right before those that begin with it.
    keys = [ids.astype(">u4").tobytes() for ids, _ in placed]
    covers: list[tuple[bytes, Ids, list[Span]]] = []
    for key, (ids, spans) in sorted(zip(keys, placed, strict=True), key=lambda pair: pair[0], reverse=True):
        if covers and covers[-1][0].startswith(key):
            covers[-1][2].extend(spans)
        else:
            covers.append((key, ids, list(spans)))
    return [(ids, spans) for _, ids, spans in covers]


def _compare(span: Span, scores: NDArray[np.float64]) -> Deltas:
    completion = span.completion
    deltas = np.abs(scores[span.start : span.end] - completion.logprobs)
    # argmax returns a NaN if there is one.
    worst = int(deltas.argmax())
    where = f"completion {completion.id}, token {worst}"
    return Deltas(len(deltas), float(deltas.sum()), float(deltas[worst]), where)


def _other_policy(recording: Recording, model: ModelInfo) -> Iterator[str]:
    result = recording.result
    if result.model is not None and result.model != model.name:
        yield f"sampled from {result.model}, scored by {model.name}"
    versions = {result.policy_version_min, result.policy_version_max} - {None}
    if versions - {model.policy_version}:
        named = " to ".join(str(version) for version in sorted(v for v in versions if v is not None))
        yield f"sampled with policy version {named}, scored with {model.policy_version}"


def recording_files(source: Path) -> list[Path]:
    """Return the recordings at a path: the file itself, or all below a directory.

    In a data directory, every file stored as a recording counts, even if damaged beyond recognition; in any
    other directory, recordings are recognised by their first bytes.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise NotFound(f"{source}: no such file or directory")
    stored = source / RECORDINGS
    is_stored = stored.is_dir()
    # Files being written have hidden names.
    files = [path for path in (stored if is_stored else source).rglob("[!.]*") if path.is_file()]
    found = sorted(path for path in files if is_stored or is_recording(path))
    if not found:
        raise InvalidInput(f"{source}: contains no recordings")
    return found


def format_counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
