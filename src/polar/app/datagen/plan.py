"""Which tasks a generation submits, under ids that follow from their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import orjson

from polar.models.task import TaskSpec

_LONGEST_NAME = 80
_DIGEST = 12


@dataclass(frozen=True, slots=True)
class PlannedTask:
    """A task of the taskset, and what is submitted for it."""

    name: str
    """Its id in the taskset."""
    spec: TaskSpec

    def again(self, sample: int, retry: int) -> PlannedTask:
        """One sample alone, to be tried once more, as it would have been sampled the first time."""
        sampling = self.spec.sampling
        if sampling.seed is not None:
            sampling = sampling.model_copy(update={"seed": sampling.seed + sample})
        changes = {"samples": 1, "early_stop": None, "sampling": sampling}
        spec = self.spec.model_copy(update={**changes, "id": f"{self.spec.id}-retry{retry}-{sample}"})
        return PlannedTask(self.name, spec)


def plan(tasks: Iterable[TaskSpec], run: str = "") -> tuple[PlannedTask, ...]:
    """The same tasks always get the same ids, so that what has been done is found again.

    Another `run` gets other ids.
    """
    return tuple(PlannedTask(task.id, _identified(task, run)) for task in tasks)


def _identified(task: TaskSpec, run: str) -> TaskSpec:
    document = task.model_dump(mode="json", exclude_defaults=True)
    content = orjson.dumps([run, document], option=orjson.OPT_SORT_KEYS)
    digest = hashlib.sha256(content).hexdigest()[:_DIGEST]
    return task.model_copy(update={"id": f"{task.id[:_LONGEST_NAME]}-{digest}"})
