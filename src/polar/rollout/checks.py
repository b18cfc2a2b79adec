"""Checks of a task that need the registered extensions: their names and their options."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from polar.config import plugins
from polar.config.settings import TaskRules
from polar.errors import InvalidInput
from polar.models.component import Component
from polar.models.task import TaskSpec


def check_components(task: TaskSpec, rules: TaskRules = TaskRules()) -> None:
    """InvalidInput, naming every field that is wrong, unless each component may be named, exists, and takes
    its options."""
    problems = []
    for kind, field, component in task.components:
        allowed = getattr(rules, kind)
        try:
            if allowed is not None and component.name not in allowed:
                raise InvalidInput(
                    f"{field}.name: {component.name!r} is not among those of server.tasks.{kind}",
                    hint=f"it may be {' or '.join(allowed) or 'none'}",
                )
            _check(kind, field, component)
        except InvalidInput as error:
            problems.append(str(error))
    image = task.runtime.options.get("image")
    patterns = rules.images
    if (
        patterns is not None
        and image is not None
        and not any(fnmatchcase(str(image), one) for one in patterns)
    ):
        problems.append(f"runtime.options.image: {image!r} is not among those of server.tasks.images")
    if problems:
        raise InvalidInput("; ".join(problems))


def check_runtime(task: TaskSpec, allowed: Collection[str]) -> None:
    """InvalidInput unless a node allows the task's runtime, or no node has joined yet."""
    name = task.runtime.name
    if allowed and name not in allowed:
        raise InvalidInput(
            f"task {task.id!r}: runtime.name: no node of this server allows {name!r}",
            hint=f"name {' or '.join(sorted(allowed))}, or have a node's owner add {name} to node.runtimes"
            " in its settings and start it again",
        )


def _check(kind: str, field: str, component: Component) -> None:
    known = plugins.names(kind)
    if component.name not in known:
        hint = f"known: {', '.join(known) or 'none'}"
        if plugins.is_new(kind, component.name):
            hint = "it was installed after this server was started: start the server and its nodes again"
        raise InvalidInput(f"{field}.name: unknown {field} {component.name!r}", hint=hint)
    try:
        plugins.options(kind, field, component)
    except ImportError as error:
        raise InvalidInput(
            f"{field}.name: {component.name!r} is registered but cannot be loaded: {error}",
            hint="reinstall the package that provides it",
        ) from error
