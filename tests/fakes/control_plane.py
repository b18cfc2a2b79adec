"""Tasks, results and a clock for tests of the control plane."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from polar.errors import PolarError
from polar.models.delivery import SIZES, CaptureGrowth, Delivery
from polar.models.session import Lease, LeaseKey, SessionResult, SessionStatus, Verdict
from polar.models.task import TaskSpec
from polar.store.delivery import Retries
from polar.store.store import Store


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


async def complete(
    store: Store, key: LeaseKey, result: SessionResult, *, retries: Retries = Retries(), **parts: Any
) -> bool:
    """Store what a node delivers for a lease; raises what is wrong with it."""
    (outcome,) = await store.deliver([Delivery(key=key, result=result, **parts)], retries)
    if isinstance(outcome, PolarError):
        raise outcome
    return outcome


def body_of(*deliveries: Delivery | CaptureGrowth) -> bytes:
    """Deliveries or growth of captures, with parts in memory, as a node sends them."""
    body = b""
    for delivery in deliveries:
        parts = [delivery.model_dump_json().encode()]
        for part in delivery.parts:
            assert not isinstance(part, PurePath)
            parts.append(part or b"")
        body += SIZES.pack(*map(len, parts)) + b"".join(parts)
    return body
