"""Evaluation reports of attempts whose outcome is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polar.evals.report import Attempt, Cell, Report, TaskOutcome, cell_of
from polar.models.session import AgentEnd, SessionStatus


def attempt(task: str, sample: int, reward: float | None = 1.0, **changes: Any) -> Attempt:
    """One that completed; without a reward, one that failed."""
    status = SessionStatus.FAILED if reward is None else SessionStatus.COMPLETED
    fields: dict[str, Any] = {
        "session_id": f"{task}.{sample}",
        "task_id": task,
        "sample": sample,
        "status": status,
        "agent_end": AgentEnd.EXITED,
        "exit_code": 0,
        "reward": reward,
        "error": "no sandbox" if reward is None else None,
        "completions": 2,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "sampled_tokens": 10,
        "seconds": 3.0,
        "agent_seconds": 2.0,
        "harness_version": "1.0",
        "model": "small",
    }
    return Attempt.model_validate({**fields, **changes})


def cell(
    rewards: Mapping[str, Sequence[float | None]],
    *,
    taskset: str = "set",
    harness: str = "pi",
    model: str = "small",
    ks: Sequence[int] = (1,),
    digest: str = "same",
) -> Cell:
    """Task → the reward of each of its samples."""
    tasks = [
        TaskOutcome(id=task, digest=digest, attempts=tuple(attempt(task, n, r) for n, r in enumerate(given)))
        for task, given in rewards.items()
    ]
    return cell_of(taskset, harness, model, tasks, threshold=1.0, ks=ks)


def report(*cells: Cell, ks: Sequence[int] = (1,), samples: int = 1, seed: int | None = None) -> Report:
    return Report(
        run="0badcafe",
        created_at=1_700_000_000.0,
        polar_version="0",
        samples=samples,
        seed=seed,
        threshold=1.0,
        ks=tuple(ks),
        cells=cells,
    )
