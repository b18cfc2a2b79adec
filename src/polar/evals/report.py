"""The attempts of an evaluation and their results: one frozen value that all reports are made from."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from polar.errors import InvalidInput, explain
from polar.evals.statistics import Estimate, mean_of_outcomes, mean_of_values, pass_at_k
from polar.models.completion import Completion
from polar.models.component import Frozen, view
from polar.models.session import AgentEnd, SessionResult, SessionStatus

LONGEST_ERROR = 2_000
LONGEST_REASON = 100
REPORT_FILE = "report.json"
MEAN_REWARD = "mean_reward"
COMPLETED = "completed"
"""Names the metric of sessions that got a verdict."""


class Attempt(Frozen):
    session_id: str
    task_id: str
    """The task's id on the server; the report groups by the taskset's own ids."""
    sample: int
    status: SessionStatus
    agent_end: AgentEnd
    exit_code: int | None = None
    reward: float | None = None
    error: str | None = None
    completions: int = 0
    prompt_tokens: int = 0
    """The total over all model calls, each counted with its whole history."""
    cached_tokens: int = 0
    """Prompt tokens that, according to the engine, came from its cache."""
    sampled_tokens: int = 0
    excluded: dict[str, int] = Field(default_factory=dict)
    """Sampled tokens that are not trainable, by reason."""
    seconds: float = 0.0
    """Seconds from creating the sandbox to the verdict, without time in queues."""
    agent_seconds: float = 0.0
    harness_version: str | None = None
    model: str | None = None

    @property
    def counts(self) -> bool:
        """Whether the attempt counts: a cancelled one says nothing about the agent."""
        return self.status is not SessionStatus.CANCELLED

    def passed(self, threshold: float) -> bool:
        """Whether the reward reaches the threshold; failed sessions never pass."""
        if self.status is not SessionStatus.COMPLETED or self.reward is None:
            return False
        return self.reward >= threshold - 1e-9

    def reason(self, threshold: float) -> str | None:
        """Why it did not pass, in words that many sessions share; None if it passed."""
        if self.passed(threshold):
            return None
        if self.status is SessionStatus.CANCELLED:
            return "cancelled"
        if self.status is SessionStatus.FAILED:
            return f"failed: {error_class(self.error or 'no reason given')}"
        match self.agent_end:
            case AgentEnd.TIMEOUT:
                return "agent ran out of time"
            case AgentEnd.BUDGET:
                return "agent used up its budget of completions or tokens"
            case AgentEnd.EXITED if not self.completions:
                return "agent made no model call"
            case AgentEnd.EXITED if self.exit_code:
                return f"agent exited with {self.exit_code}"
            case AgentEnd.EXITED:
                return "agent finished, reward too low"
            case _:
                return f"agent {self.agent_end.replace('_', ' ')}"


def attempt_of(result: SessionResult, completions: Iterable[Completion]) -> Attempt:
    seconds, stats = result.seconds, result.stats
    calls = tuple(completions)
    return view(
        Attempt,
        result,
        error=result.error and result.error[:LONGEST_ERROR],
        completions=stats.completions,
        prompt_tokens=sum(call.prompt_tokens for call in calls),
        cached_tokens=sum(call.cached_tokens for call in calls),
        sampled_tokens=stats.sampled_tokens,
        excluded=stats.excluded,
        seconds=seconds.init + seconds.running + seconds.postrun,
        agent_seconds=seconds.running,
    )


_PARTICULARS = (
    (re.compile(r"https?://\S+"), "URL"),
    (re.compile(r"(?<![\w.])~?/[\w.+@-]+(?:/[\w.+@-]+)*/?"), "PATH"),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}(?:-[0-9a-f]{4,})*\b", re.IGNORECASE), "ID"),
    (re.compile(r"\d+(?:\.\d+)?"), "N"),
)


def error_class(error: str) -> str:
    """Return an error's first line without details of one session, so that equal failures count together."""
    lines = error.strip().splitlines()
    text = " ".join(lines[0].split()) if lines else ""
    for pattern, word in _PARTICULARS:
        text = pattern.sub(word, text)
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


class TaskOutcome(Frozen):
    """All attempts at one task by one harness with one model."""

    id: str
    digest: str
    """A digest of the question and its grading; tasks of two runs are the same only if it is equal."""
    attempts: tuple[Attempt, ...]
    """The attempts by sample, including cancelled ones."""

    @property
    def counted(self) -> tuple[Attempt, ...]:
        return tuple(attempt for attempt in self.attempts if attempt.counts)

    def passed(self, threshold: float) -> int:
        return sum(attempt.passed(threshold) for attempt in self.counted)

    def pass_rate(self, threshold: float) -> float | None:
        return self.passed(threshold) / len(self.counted) if self.counted else None

    @property
    def mean_reward(self) -> float | None:
        """The mean reward; a failed session counts as 0."""
        counted = self.counted
        return sum(attempt.reward or 0.0 for attempt in counted) / len(counted) if counted else None


class Cost(Frozen):
    sessions: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    agent_seconds: float = 0.0

    def per_session(self, total: float) -> float:
        return total / self.sessions if self.sessions else 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens

    @property
    def tokens_per_session(self) -> float:
        return self.per_session(self.tokens)


class Cell(Frozen):
    """One harness with one model on one taskset."""

    taskset: str
    harness: str
    model: str
    harness_version: str | None
    tasks: tuple[TaskOutcome, ...]
    metrics: dict[str, Estimate]
    """`pass@K`, `mean_reward` and `completed`; pass@K is absent if no task has K samples."""
    cost: Cost
    failures: dict[str, int]
    """Number of sessions by the reason they did not pass, most frequent first."""
    excluded: dict[str, int]
    """Number of sampled tokens by the reason they are not trainable."""

    @property
    def name(self) -> str:
        return f"{self.harness} · {self.model} · {self.taskset}"

    @property
    def attempts(self) -> Iterator[Attempt]:
        return (attempt for task in self.tasks for attempt in task.attempts)


class Report(Frozen):
    """A finished evaluation."""

    format: Literal["polar-eval-1"] = "polar-eval-1"
    run: str
    """The evaluation's id; the ids of its tasks on the server begin with it."""
    created_at: float
    """The time in Unix seconds."""
    polar_version: str
    samples: int
    seed: int | None
    has_seeds_of_tasks: bool = False
    """Whether each task had a seed of its own; earlier reports had one for all."""
    threshold: float
    """Minimum reward for a session to pass."""
    ks: tuple[int, ...]
    weights: str | None = None
    """A digest of the weights given by `--weights` instead of the model's own."""
    cells: tuple[Cell, ...] = Field(min_length=1)


_COUNTED = ("completions", "prompt_tokens", "cached_tokens", "sampled_tokens", "seconds", "agent_seconds")


def cell_of(
    taskset: str,
    harness: str,
    model: str,
    tasks: Sequence[TaskOutcome],
    *,
    threshold: float,
    ks: Sequence[int],
) -> Cell:
    attempts = [attempt for task in tasks for attempt in task.attempts]
    counted = [attempt for attempt in attempts if attempt.counts]
    reasons = Counter(reason for attempt in attempts if (reason := attempt.reason(threshold)))
    excluded: Counter[str] = Counter()
    for attempt in attempts:
        excluded.update(attempt.excluded)
    versions = sorted({attempt.harness_version for attempt in attempts if attempt.harness_version})
    return Cell(
        taskset=taskset,
        harness=harness,
        model=model,
        harness_version=", ".join(versions) or None,
        tasks=tuple(tasks),
        metrics=_metrics(tasks, threshold, ks),
        cost=Cost(
            sessions=len(counted), **{name: sum(getattr(one, name) for one in counted) for name in _COUNTED}
        ),
        failures=dict(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
        excluded=dict(sorted(excluded.items())),
    )


def _metrics(tasks: Sequence[TaskOutcome], threshold: float, ks: Sequence[int]) -> dict[str, Estimate]:
    passed = [(len(task.counted), task.passed(threshold)) for task in tasks]
    completed = [
        sum(attempt.status is SessionStatus.COMPLETED for attempt in task.counted) / len(task.counted)
        for task in tasks
        if task.counted
    ]
    found = {
        f"pass@{k}": mean_of_outcomes([pass_at_k(n, c, k) for n, c in passed if n >= k]) for k in sorted(ks)
    }
    found[MEAN_REWARD] = mean_of_values([task.mean_reward for task in tasks if task.mean_reward is not None])
    found[COMPLETED] = mean_of_outcomes(completed)
    return {name: estimate for name, estimate in found.items() if estimate is not None}


def only_harness(report: Report, label: str | None) -> Report:
    """Keep one of a report's harnesses; None keeps all."""
    if label is None:
        return report
    cells = tuple(cell for cell in report.cells if cell.harness == label)
    if not cells:
        known = ", ".join(dict.fromkeys(cell.harness for cell in report.cells))
        raise InvalidInput(f"run {report.run} has no harness {label!r}", hint=f"it has {known}")
    return report.model_copy(update={"cells": cells})


def load_report(path: Path) -> Report:
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        return Report.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        if not path.is_dir():
            raise InvalidInput(f"{path}: no such directory", hint="name the --out of `polar eval`") from None
        raise InvalidInput(
            f"{path}: contains no {REPORT_FILE}",
            hint="it is written when all sessions of an evaluation have ended",
        ) from None
    except OSError as error:
        raise InvalidInput(f"{file}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = explain(error).split("; ")[0]
        raise InvalidInput(f"{file}: not a report of this version of Polar: {first}") from None


@dataclass(frozen=True, slots=True)
class Gate:
    """The minimum of a metric that an evaluation must reach for `--fail-under`."""

    metric: str
    minimum: float


def parse_gate(text: str, ks: Sequence[int]) -> Gate:
    """Parse `pass@1=0.4`; refuse a metric that the report will not have, before anything runs."""
    metric, found, number = (part.strip() for part in text.partition("="))
    if not found:
        raise InvalidInput(f"--fail-under: {text!r} is not METRIC=MINIMUM", hint="for example pass@1=0.4")
    known = [*(f"pass@{k}" for k in ks), MEAN_REWARD, COMPLETED]
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise InvalidInput(f"--fail-under: unknown metric {metric!r}", hint=hint)
    try:
        minimum = float(number)
    except ValueError:
        minimum = math.nan
    if not math.isfinite(minimum):
        raise InvalidInput(f"--fail-under: {number!r} is not a number")
    return Gate(metric, minimum)


def below_gates(report: Report, gates: Sequence[Gate]) -> list[str]:
    """Return one line for each harness, model and taskset whose estimate is below a gate."""
    lines = []
    for gate in gates:
        for cell in report.cells:
            estimate = cell.metrics.get(gate.metric)
            if estimate is None:
                lines.append(f"{cell.name}: {gate.metric} is unknown: no task has enough samples")
            elif estimate.value < gate.minimum - 1e-9:
                lines.append(f"{cell.name}: {gate.metric} is {estimate.value:.3f}, below {gate.minimum:g}")
    return lines
