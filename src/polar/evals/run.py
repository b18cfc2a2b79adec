"""Runs a plan to its end, recording every attempt in a journal from which it can resume."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

from pydantic import ValidationError

from polar import __version__
from polar.app.rollouts import RolledOut, roll_out
from polar.client import AsyncClient
from polar.errors import InvalidInput
from polar.evals.plan import Conditions, Plan, PlannedCell
from polar.evals.report import Attempt, Cell, Report, TaskOutcome, attempt_of, cell_of
from polar.files import lock
from polar.models.task import Run

JOURNAL_FILE = "attempts.jsonl"


class Journal:
    """The ended attempts of an evaluation, one per line; a line cut short by a crash is dropped."""

    def __init__(self, out: Path) -> None:
        path = out / JOURNAL_FILE
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self._file = path.open("a+b")
        lock(self._file, busy=InvalidInput(f"{out}: another evaluation is running there"))
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                attempt = Attempt.model_validate_json(line)
            except ValidationError:
                raise InvalidInput(
                    f"{path}:{number}: not an attempt of this version of Polar", hint="choose another --out"
                ) from None
            self.attempts[attempt.task_id, attempt.sample] = attempt

    def append(self, attempt: Attempt) -> None:
        self._file.write(attempt.model_dump_json().encode() + b"\n")
        self._file.flush()
        self.attempts[attempt.task_id, attempt.sample] = attempt


Connect = Callable[[str | None], AbstractAsyncContextManager[AsyncClient]]
"""Opens the client of a server that runs a given model."""


async def run_plan(
    plan: Plan, journal: Journal, connect: Connect, ended: Callable[[Attempt], None], run: Run
) -> None:
    """Run every attempt that the journal lacks, one model after another; `ended` gets each new one."""

    def keep(session: RolledOut) -> None:
        calls = session.recording.completions if session.recording else ()
        attempt = attempt_of(session.result, calls)
        journal.append(attempt)
        ended(attempt)

    for model in dict.fromkeys(cell.model for cell in plan.cells):
        specs = [task.spec for task in plan.tasks(model)]
        wanted = {spec.id: {(spec.id, number) for number in range(spec.samples)} for spec in specs}
        missing = [spec for spec in specs if wanted[spec.id] - journal.attempts.keys()]
        if missing:
            async with connect(model) as client:
                # Submitting the same content under the same id again changes nothing.
                await roll_out(client, missing, keep, run=run, skip=journal.attempts)


def report_of(plan: Plan, journal: Journal) -> Report:
    return Report(
        run=plan.run,
        created_at=time.time(),
        polar_version=__version__,
        samples=plan.conditions.samples,
        seed=plan.conditions.seed,
        has_seeds_of_tasks=True,
        threshold=plan.conditions.threshold,
        ks=plan.conditions.ks,
        weights=plan.conditions.weights,
        cells=tuple(_cell(planned, plan.conditions, journal) for planned in plan.cells),
    )


def _cell(planned: PlannedCell, conditions: Conditions, journal: Journal) -> Cell:
    outcomes = []
    for task in planned.tasks:
        found = [journal.attempts.get((task.spec.id, number)) for number in range(conditions.samples)]
        attempts = tuple(attempt for attempt in found if attempt is not None)
        outcomes.append(TaskOutcome(id=task.id, digest=task.digest, attempts=attempts))
    served = sorted({attempt.model for task in outcomes for attempt in task.attempts if attempt.model})
    model = _model_name(planned.model) if planned.model else ", ".join(served) or "unknown"
    threshold, ks = conditions.threshold, conditions.ks
    return cell_of(planned.taskset, planned.harness, model, outcomes, threshold=threshold, ks=ks)


def _model_name(given: str) -> str:
    """Return the name of a directory without the rest of its path, which says nothing about the model."""
    path = Path(given)
    return path.resolve().name if path.is_dir() else given
