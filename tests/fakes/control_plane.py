"""Tasks, results and a clock for tests of the control plane."""

from __future__ import annotations

from typing import Any

from polar.models.session import Lease, SessionResult, SessionStatus, Verdict
from polar.models.task import TaskSpec
from polar.models.views import LEASE_SECRET


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def idle_task(id: str = "task", **changes: Any) -> TaskSpec:
    """A task made of extensions that `register_idle_extensions` knows."""
    document = {
        "id": id,
        "instruction": "do nothing",
        "harness": "idle",
        "evaluator": "idle",
        "runtime": "idle",
        "builder": "idle",
    }
    return TaskSpec.model_validate({**document, **changes})


def upload_of(lease: Lease) -> dict[str, Any]:
    """What of a request says under which lease its bytes are uploaded."""
    return {
        "params": {"fencing_token": lease.fencing_token},
        "headers": {LEASE_SECRET: lease.key.secret},
    }


def result_of(
    lease: Lease, reward: float = 1.0, status: SessionStatus = SessionStatus.COMPLETED, **changes: Any
) -> SessionResult:
    """What a node would deliver for this lease."""
    return SessionResult(
        session_id=lease.session_id,
        task_id=lease.task.id,
        sample=lease.sample,
        attempt=lease.attempt,
        status=status,
        verdict=Verdict(reward=reward) if status is SessionStatus.COMPLETED else None,
        **changes,
    )
