"""What an evaluation runs: every harness with every model on every taskset, under stable ids."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from polar.config import plugins
from polar.config.documents import STDIN
from polar.errors import InvalidInput, explain
from polar.files import make_directory, write_atomic
from polar.models.component import Component, Frozen
from polar.models.task import TaskSpec
from polar.tasksets.files import Loaded, listing, read_tasks

MEMO_FILE = "evaluation.json"
OWN = "own"
"""The label of the harness that each task itself names."""

_CONTENT = ("instruction", "files", "prepare", "evaluator")
"""The fields that identify a task, whoever attempts it."""
_LONGEST_ID = 128 - len(".1023")
"""Leaves room for a session's id, which is the task's followed by the sample number."""


class HarnessChoice(Frozen):
    """A harness to evaluate; without a component, the one that each task names."""

    label: str
    component: Component | None = None


@dataclass(frozen=True, slots=True)
class PlannedTask:
    id: str
    """The id in its taskset."""
    digest: str
    spec: TaskSpec


@dataclass(frozen=True, slots=True)
class PlannedCell:
    taskset: str
    harness: str
    model: str | None
    """The model's name; None for the model of the server or engine."""
    tasks: tuple[PlannedTask, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The settings that all attempts share."""

    samples: int
    seed: int | None = None
    temperature: float | None = None
    runtime: str | None = None
    """The runtime; None for the one that each task names."""
    threshold: float = 1.0
    ks: tuple[int, ...] = (1,)
    weights: str | None = None
    """A digest of the weights to sample with; None for the server's or the model's own."""


@dataclass(frozen=True, slots=True)
class Plan:
    run: str
    conditions: Conditions
    cells: tuple[PlannedCell, ...]
    problems: tuple[str, ...] = ()
    """One line for each task that cannot be run; the others are evaluated."""

    def tasks(self, model: str | None) -> list[PlannedTask]:
        """Return all tasks that a model is evaluated on."""
        return [task for cell in self.cells if cell.model == model for task in cell.tasks]

    @property
    def sessions(self) -> int:
        return self.conditions.samples * sum(len(cell.tasks) for cell in self.cells)

    @property
    def fingerprint(self) -> str:
        """A digest of everything that the plan submits, except for ids derived from its run."""
        fields = set(TaskSpec.model_fields) - {"id", "run", "priority", "metadata"}
        lines = [f"weights {self.conditions.weights}"] if self.conditions.weights else []
        for cell in self.cells:
            lines.append(repr((cell.taskset, cell.harness, cell.model)))
            lines += [f"{task.id} {_digest(task.spec, fields)}" for task in cell.tasks]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Memo(Frozen):
    """Stored in the evaluation's directory from the start, so that the same command resumes it."""

    format: Literal["polar-eval-1"] = "polar-eval-1"
    run: str
    fingerprint: str


def name_tasksets(paths: Sequence[Path]) -> dict[str, Path]:
    """Map the shortest distinctive name of each path to the path."""
    if STDIN in paths:
        raise InvalidInput("--taskset: standard input cannot be read again when the evaluation resumes")
    short = [path.resolve().stem if path.is_file() else path.resolve().name for path in paths]
    twice = {name for name, count in Counter(short).items() if count > 1}
    names = [_text(str(path) if name in twice else name) for path, name in zip(paths, short, strict=True)]
    if len(set(names)) < len(names):
        raise InvalidInput("--taskset: the same taskset is given twice")
    return dict(zip(names, paths, strict=True))


def _text(given: str) -> str:
    """Decode a command-line argument, replacing bytes that are not UTF-8, which JSON could not hold."""
    return given.encode("utf-8", "replace").decode()


_HARNESS = re.compile(
    r"(?:(?P<label>[^={}:]+)=)?(?P<name>[a-z][a-z0-9_]{0,63})(?::(?P<options>\{.*\}))?", re.DOTALL
)


def parse_harness(text: str) -> HarnessChoice:
    """Parse `NAME`, `NAME:{options}` or `LABEL=NAME:{options}`, or `own` for the task's own harness."""
    text = _text(text)
    if text == OWN:
        return HarnessChoice(label=OWN)
    found = _HARNESS.fullmatch(text.strip())
    if not found:
        raise InvalidInput(
            f"--harness: {text!r} is not [LABEL=]NAME[:{{OPTIONS}}]",
            hint="for example claude_code, or quick=pi:{…}; names have underscores",
        )
    try:
        options: Any = yaml.safe_load(found["options"]) if found["options"] else {}
        component = Component(name=found["name"], options=options)
    except yaml.YAMLError as error:
        raise InvalidInput(f"--harness {found['name']}: options: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise InvalidInput(f"--harness {found['name']}: {explain(error)}") from None
    return HarnessChoice(label=(found["label"] or found["name"]).strip(), component=component)


def check_harnesses(choices: Sequence[HarnessChoice]) -> None:
    """Raise for a name that is not registered here, before tasks are loaded."""
    for choice in choices:
        if choice.component is not None:
            plugins.load("harnesses", choice.component.name)


def make_plan(
    tasksets: Mapping[str, Path],
    harnesses: Sequence[HarnessChoice],
    models: Sequence[str | None],
    conditions: Conditions,
    *,
    run: str,
) -> Plan:
    """Plan all combinations, giving each task an id of its own."""
    labels = Counter(choice.label for choice in harnesses)
    if (most := labels.most_common(1)) and most[0][1] > 1:
        raise InvalidInput(
            f"--harness: two are called {most[0][0]!r}", hint="label them, for example a=pi:{…} b=pi:{…}"
        )
    if len(set(models)) < len(models):
        raise InvalidInput("--model: the same model is given twice")
    cells: list[PlannedCell] = []
    problems: dict[str, None] = {}
    for name, path in tasksets.items():
        loaded = [_load(path, choice, conditions) for choice in harnesses]
        problems |= dict.fromkeys(problem for one in loaded for problem in one.problems)
        if len({tuple(task.id for task in one.tasks) for one in loaded}) > 1:
            raise InvalidInput(
                f"{name}: not all harnesses can run the same tasks: {listing(tuple(problems))}"
            )
        for model in models:
            for choice, one in zip(harnesses, loaded, strict=True):
                prefix = f"eval-{run}-{len(cells)}-"
                tasks = tuple(_plan_task(task, conditions.samples, prefix) for task in one.tasks)
                cells.append(PlannedCell(name, choice.label, model, tasks))
    return Plan(run, conditions, tuple(cells), tuple(problems))


def _load(path: Path, choice: HarnessChoice, conditions: Conditions) -> Loaded:
    """Load the taskset for a harness. Options that a task has for the same harness are kept."""
    over: dict[str, Any] = {}
    if choice.component is not None:
        over["harness"] = choice.component.model_dump(mode="json")
    if conditions.runtime is not None:
        over["runtime"] = {"name": conditions.runtime}
    if conditions.temperature is not None:
        over["sampling"] = {"temperature": conditions.temperature}
    loaded = read_tasks(path, over=over, seed=conditions.seed)
    if not loaded.tasks:
        raise InvalidInput(listing(loaded.problems) if loaded.problems else f"{path}: contains no tasks")
    return loaded


def _plan_task(task: TaskSpec, samples: int, prefix: str) -> PlannedTask:
    # Every sample is wanted, even after some have succeeded. Branches are not independent of them.
    changes = {"id": _server_id(prefix, task.id), "samples": samples, "early_stop": None, "branching": None}
    return PlannedTask(task.id, _digest(task, _CONTENT), task.model_copy(update=changes))


def _server_id(prefix: str, task_id: str) -> str:
    if len(prefix) + len(task_id) <= _LONGEST_ID:
        return prefix + task_id
    digest = hashlib.sha256(task_id.encode()).hexdigest()[:16]
    return f"{prefix}{task_id[: _LONGEST_ID - len(prefix) - len(digest) - 1]}-{digest}"


def _digest(task: TaskSpec, fields: Collection[str]) -> str:
    return hashlib.sha256(task.model_dump_json(include=set(fields)).encode()).hexdigest()[:16]


def run_in(out: Path) -> str:
    """Return the run in the directory, or a new one."""
    memo = _memo(out)
    return memo.run if memo else secrets.token_hex(4)


def bind_directory(plan: Plan, out: Path) -> None:
    """Bind the directory to the plan; raise InvalidInput if it belongs to another."""
    memo = _memo(out)
    mine = Memo(run=plan.run, fingerprint=plan.fingerprint)
    if memo is None:
        make_directory(out)
        write_atomic(out / MEMO_FILE, mine.model_dump_json(indent=2) + "\n")
    elif memo != mine:
        raise InvalidInput(
            f"{out} belongs to an evaluation with other tasks, harnesses, models, weights or samples",
            hint="choose another --out, or repeat the command that started it",
        )


def _memo(out: Path) -> Memo | None:
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"{out}: is not a directory")
    path = out / MEMO_FILE
    try:
        return Memo.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValidationError:
        raise InvalidInput(
            f"{path}: not an evaluation of this version of Polar", hint="choose another --out"
        ) from None
