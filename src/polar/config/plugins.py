"""Finds plug-ins by name through Python entry points, so that any installed package can add one."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from polar.config.settings import TaskRules
from polar.errors import InvalidInput, explain
from polar.models.component import Component
from polar.models.task import TaskSpec


class PluginClass(Protocol):
    """Every registered class has a model of its options and a constructor that takes it."""

    Options: type[BaseModel]


class UnknownName(InvalidInput):
    """No installed package registers this name; another machine may have it."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind}: unknown name {name!r}", hint=f"known: {', '.join(names(kind)) or 'none'}")
        self.name = name


@cache
def names(kind: str) -> tuple[str, ...]:
    """Return the names registered for a kind ("harnesses", "runtimes", …), sorted."""
    return tuple(sorted({point.name for point in entry_points(group=f"polar.{kind}")}))


def is_new(kind: str, name: str) -> bool:
    """Whether a package installed after this process started registers the name."""
    return name not in names(kind) and bool(entry_points(group=f"polar.{kind}", name=name))


@cache
def load(kind: str, name: str) -> Any:
    """Return the class registered under `name`, importing it on first use."""
    # The cached list answers quickly: a file of many tasks may name what is not installed here.
    if name not in names(kind):
        raise UnknownName(kind, name)
    point, *_ = entry_points(group=f"polar.{kind}", name=name)
    return point.load()


def options(kind: str, field: str, component: Component) -> BaseModel:
    """Validate a component's options with its own model; errors name the field as the user wrote it."""
    extension: PluginClass = load(kind, component.name)
    try:
        return extension.Options.model_validate(component.options)
    except ValidationError as error:
        raise InvalidInput(explain(error, f"{field}.options")) from None


def create(kind: str, field: str, component: Component) -> Any:
    """Create the named plug-in from its validated options."""
    return load(kind, component.name)(options(kind, field, component))


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
    image, allowed = task.runtime.options.get("image"), rules.images
    if not (image is None or allowed is None or any(fnmatchcase(str(image), one) for one in allowed)):
        problems.append(f"runtime.options.image: {image!r} is not among those of server.tasks.images")
    if problems:
        raise InvalidInput("; ".join(problems))


def _check(kind: str, field: str, component: Component) -> None:
    known = names(kind)
    if component.name not in known:
        hint = f"known: {', '.join(known) or 'none'}"
        if is_new(kind, component.name):
            hint = "it was installed after this server was started: start the server and its nodes again"
        raise InvalidInput(f"{field}.name: unknown {field} {component.name!r}", hint=hint)
    try:
        options(kind, field, component)
    except ImportError as error:
        raise InvalidInput(
            f"{field}.name: {component.name!r} is registered but cannot be loaded: {error}",
            hint="reinstall the package that provides it",
        ) from error
