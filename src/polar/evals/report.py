"""What came of an evaluation as one frozen value, from which every form of report is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from polar.errors import InvalidInput, explain
from polar.evals.attempts import Attempt
from polar.evals.statistics import Estimate, mean_of_outcomes, mean_of_values, pass_at_k
from polar.models.component import Frozen
from polar.models.session import SessionStatus

REPORT_FILE = "report.json"
MEAN_REWARD = "mean_reward"
COMPLETED = "completed"
"""The metric: the share of sessions that came to a verdict."""


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
    threshold: float
    """The least reward with which a session has passed."""
    ks: tuple[int, ...]
    cells: tuple[Cell, ...] = Field(min_length=1)


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
            sessions=len(counted),
            completions=sum(attempt.completions for attempt in counted),
            prompt_tokens=sum(attempt.prompt_tokens for attempt in counted),
            cached_tokens=sum(attempt.cached_tokens for attempt in counted),
            sampled_tokens=sum(attempt.sampled_tokens for attempt in counted),
            seconds=sum(attempt.seconds for attempt in counted),
            agent_seconds=sum(attempt.agent_seconds for attempt in counted),
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
