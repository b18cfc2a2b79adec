"""An evaluation's attempts and what came of them: one frozen value that every report is made of."""

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
"""The metric: the share of sessions that came to a verdict."""


class Attempt(Frozen):
    """One sample of one task, ended."""

    session_id: str
    task_id: str
    """As the server knows it; the report groups by the taskset's own ids."""
    sample: int
    status: SessionStatus
    agent_end: AgentEnd
    exit_code: int | None = None
    reward: float | None = None
    error: str | None = None
    completions: int = 0
    prompt_tokens: int = 0
    """Of all model calls, each with its whole history."""
    cached_tokens: int = 0
    """Prompt tokens that, the engine says, came from its cache."""
    sampled_tokens: int = 0
    excluded: dict[str, int] = Field(default_factory=dict)
    """Sampled tokens that are not trainable, by reason."""
    seconds: float = 0.0
    """From making the sandbox to the verdict, without time in queues."""
    agent_seconds: float = 0.0
    harness_version: str | None = None
    model: str | None = None

    @property
    def counts(self) -> bool:
        """Whether it is an attempt at all: what a user cancelled says nothing of the agent."""
        return self.status is not SessionStatus.CANCELLED

    def passed(self, threshold: float) -> bool:
        """A session that failed has not passed, whatever the cause."""
        if self.status is not SessionStatus.COMPLETED or self.reward is None:
            return False
        return self.reward >= threshold - 1e-9

    def reason(self, threshold: float) -> str | None:
        """Why it did not pass, in words that many sessions share; None if it did."""
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
                return "agent ran out of its budget of completions or tokens"
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
    """An error's first line without what is particular to one session: equal faults count together."""
    lines = error.strip().splitlines()
    text = " ".join(lines[0].split()) if lines else ""
    for pattern, word in _PARTICULARS:
        text = pattern.sub(word, text)
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


class TaskOutcome(Frozen):
    """All attempts at one task by one harness with one model."""

    id: str
    digest: str
    """Of what is asked and how it is judged; tasks of two runs are the same task only if it is the same."""
    attempts: tuple[Attempt, ...]
    """By sample; those that were cancelled are here too."""

    @property
    def counted(self) -> tuple[Attempt, ...]:
        return tuple(attempt for attempt in self.attempts if attempt.counts)

    def passed(self, threshold: float) -> int:
        return sum(attempt.passed(threshold) for attempt in self.counted)

    def pass_rate(self, threshold: float) -> float | None:
        return self.passed(threshold) / len(self.counted) if self.counted else None

    @property
    def mean_reward(self) -> float | None:
        """A session that failed has reward 0."""
        counted = self.counted
        return sum(attempt.reward or 0.0 for attempt in counted) / len(counted) if counted else None


class Cost(Frozen):
    """What the sessions used together."""

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
    """`pass@K`, `mean_reward` and `completed`; a pass@K for which no task has K samples is absent."""
    cost: Cost
    failures: dict[str, int]
    """Why sessions did not pass → how many, most first."""
    excluded: dict[str, int]
    """Why sampled tokens are not trainable → how many."""

    @property
    def name(self) -> str:
        return f"{self.harness} · {self.model} · {self.taskset}"

    @property
    def attempts(self) -> Iterator[Attempt]:
        return (attempt for task in self.tasks for attempt in task.attempts)


class Report(Frozen):
    """An evaluation that has ended."""

    format: Literal["polar-eval-1"] = "polar-eval-1"
    run: str
    """The evaluation's own id; its tasks' ids on the server begin with it."""
    created_at: float
    """Unix seconds."""
    polar_version: str
    samples: int
    seed: int | None
    has_seeds_of_tasks: bool = False
    """Whether each task was drawn with a seed of its own; earlier reports had one for all."""
    threshold: float
    """Minimum reward for a session to pass."""
    ks: tuple[int, ...]
    weights: str | None = None
    """A digest of the weights that were sampled with instead of the model's own (`--weights`)."""
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
    """The attempts of one harness and model on one taskset, counted."""
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
    """The report of one of its harnesses; None: of all."""
    if label is None:
        return report
    cells = tuple(cell for cell in report.cells if cell.harness == label)
    if not cells:
        known = ", ".join(dict.fromkeys(cell.harness for cell in report.cells))
        raise InvalidInput(f"no harness {label!r} in run {report.run}", hint=f"it has {known}")
    return report.model_copy(update={"cells": cells})


def load_report(path: Path) -> Report:
    """The report in an evaluation's directory, or in the file itself."""
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        return Report.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise InvalidInput(
            f"{path}: no {REPORT_FILE} there", hint="an evaluation writes it when all its sessions have ended"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{file}: cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = explain(error).split("; ")[0]
        raise InvalidInput(f"{file}: not a report of this version of Polar: {first}") from None


@dataclass(frozen=True, slots=True)
class Gate:
    """What an evaluation must reach for a pipeline to go on."""

    metric: str
    minimum: float


def parse_gate(text: str, ks: Sequence[int]) -> Gate:
    """`pass@1=0.4`; a metric that the report will not have is an error before anything runs."""
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
    """One line for each harness, model and taskset that stays below a gate. Its estimate decides."""
    lines = []
    for gate in gates:
        for cell in report.cells:
            estimate = cell.metrics.get(gate.metric)
            if estimate is None:
                lines.append(f"{cell.name}: {gate.metric} is not there: no task has enough samples")
            elif estimate.value < gate.minimum - 1e-9:
                lines.append(f"{cell.name}: {gate.metric} is {estimate.value:.3f}, under {gate.minimum:g}")
    return lines
