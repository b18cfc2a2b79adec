"""Checks of a task that need the registered extensions: their names and their options."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polar import plugins
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.models.task import TaskSpec


@contextmanager
def concerning(task_id: str) -> Iterator[None]:
    """Say which task of several an error is about."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"task {task_id!r}: {error.message}", hint=error.hint) from error


def check_components(task: TaskSpec) -> None:
    """InvalidInput, naming every field that is wrong, unless each component exists and takes its options."""
    problems = []
    for kind, field, component in (
        ("harnesses", "harness", task.harness),
        ("runtimes", "runtime", task.runtime),
        ("evaluators", "evaluator", task.evaluator),
        ("builders", "builder", task.builder),
    ):
        try:
            _check(kind, field, component)
        except InvalidInput as error:
            problems.append(str(error))
    if problems:
        raise InvalidInput("; ".join(problems))


def _check(kind: str, field: str, component: Component) -> None:
    known = plugins.names(kind)
    if component.name not in known:
        raise InvalidInput(
            f"{field}.name: unknown {field} {component.name!r}", hint=f"known: {', '.join(known) or 'none'}"
        )
    try:
        plugins.options(kind, field, component)
    except ImportError as error:
        raise InvalidInput(
            f"{field}.name: {component.name!r} is registered but cannot be loaded: {error}",
            hint="reinstall the package that provides it",
        ) from error
