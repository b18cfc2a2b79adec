"""The Python reference: classes for programs and plug-ins, from signatures and docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from tools.documentation.docstrings import attributes, cell, code, documentation, table, values

CLIENT = (
    ("polar", ("Client", "AsyncClient")),
    ("polar.models.task", ("TaskSpec", "Budgets", "SamplingPin")),
    ("polar.models.session", ("SessionResult", "SessionStatus", "AgentEnd", "TrajectoryStats")),
    ("polar.models.trace", ("Trajectory", "Trace")),
    ("polar.recordings.recording", ("decode", "Recording")),
    ("polar.bridges.sessions", ("Order", "ScoredSession", "roll_out_groups")),
    ("polar.webhooks", ("verify", "Recent", "Notice", "InvalidNotice", "ReplayedNotice")),
)
PLUGINS = (
    ("polar.harnesses.base", ("Harness", "HarnessContext", "Installation")),
    ("polar.evaluators.base", ("Evaluator", "EvaluationContext", "EvaluationFailed")),
    ("polar.models.session", ("Verdict",)),
    ("polar.tasksets.rows", ("RowSource", "Row", "BadRow")),
    (
        "polar.runtimes.base",
        ("Runtime", "Sandbox", "SandboxSpec", "Host", "Command", "ExecResult", "Output", "ToolDirectory"),
    ),
    ("polar.engines.base", ("Engine", "GenerateRequest", "TokenChunk")),
    ("polar.dialects.base", ("Dialect", "StreamEncoder")),
    ("polar.trajectory.base", ("Builder",)),
    ("polar.trajectory.branching", ("BranchingStrategy", "places", "turns")),
)
LONGEST_LINE = 88
TWINS = {"AsyncClient": "Client"}
"""Classes that have the methods of another, awaited; they are shown once."""


def client_page() -> str:
    return "\n\n".join(["# Python", "The classes and functions that programs use.", *_modules(CLIENT)])


def plugins_page() -> str:
    intro = (
        "A plug-in is a class of one of these kinds, registered as an entry point of its package."
        " Tasks and settings then use its name.\n\n"
        '```toml\n[project.entry-points."polar.harnesses"]\nmy_agent = "my_package.harness:MyAgent"\n```\n\n'
        "Groups: `polar.harnesses`, `polar.evaluators`, `polar.tasksets`, `polar.runtimes`, `polar.engines`,"
        " `polar.dialects`, `polar.builders`, `polar.branchings`. `Options` is a pydantic model of"
        " the plug-in's options; invalid ones are refused when a task is submitted."
    )
    return "\n\n".join(["# Plug-ins", intro, *_modules(PLUGINS)])


def _modules(listed: tuple[tuple[str, tuple[str, ...]], ...]) -> Iterator[str]:
    for path, names in listed:
        module = import_module(path)
        for name in names:
            yield f"## {name}"
            yield f"`{path}.{name}`"
            thing = getattr(module, name)
            yield from _class(thing, name) if inspect.isclass(thing) else _function(thing, name)


def _class(cls: type, name: str) -> Iterator[str]:
    yield _escaped(documentation(cls))
    if name in TWINS:
        twin = TWINS[name]
        yield f"Has the methods of [`{twin}`](#{twin.lower()}), awaited or iterated with `async for`."
        return
    if issubclass(cls, Enum):
        yield table(("value", "meaning"), [(code(value), cell(told)) for value, told in values(cls).items()])
        return
    if not issubclass(cls, BaseModel) and not dataclasses.is_dataclass(cls) and "__init__" in vars(cls):
        yield from _function(vars(cls)["__init__"], name)
    if fields := list(_fields(cls)):
        yield table(("attribute", "type", "meaning"), fields)
    if properties := list(_properties(cls)):
        yield table(("property", "type", "meaning"), properties)
    for method, function in _methods(cls):
        yield f"### {name}.{method}"
        yield from _function(function, method)


def _fields(cls: type) -> Iterator[tuple[str, ...]]:
    told = attributes(cls)
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("polar"):
            annotations |= vars(base).get("__annotations__", {})
    for name, annotation in annotations.items():
        if not name.startswith("_") and name != "model_config":
            yield code(name), code(_shown(annotation)), cell(told.get(name, ""))


def _properties(cls: type) -> Iterator[tuple[str, ...]]:
    for name, member in inspect.getmembers(cls, lambda member: isinstance(member, property)):
        function = member.fget
        if not name.startswith("_") and function.__module__.startswith("polar"):
            returned = function.__annotations__.get("return", "")
            yield code(name), code(_shown(returned)), cell(documentation(function))


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    seen = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("polar"):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(_plain(member))
            if name.startswith("_") or name in seen or not inspect.isfunction(function):
                continue
            if issubclass(cls, BaseModel) and not documentation(function):
                continue
            seen.add(name)
            yield name, function


def _plain(member: Any) -> Any:
    return member.__func__ if isinstance(member, classmethod | staticmethod) else member


def _function(function: Any, name: str) -> Iterator[str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    before = "async def " if isinstance(definition, ast.AsyncFunctionDef) else "def "
    after = f" -> {ast.unparse(definition.returns)}" if definition.returns else ""
    if definition.name == "__init__":
        before = after = ""
    yield f"```python\n{before}{name}{_parameters(definition.args, len(before + name + after))}{after}\n```"
    if told := documentation(function):
        yield _escaped(told)


def _parameters(arguments: ast.arguments, beside: int) -> str:
    """Return the parameters without `self`, on one line each if a single line would be too long."""
    for kind in (arguments.posonlyargs, arguments.args):
        if kind and kind[0].arg in ("self", "cls"):
            del kind[0]
    text = ast.unparse(arguments)
    if len(text) + beside < LONGEST_LINE:
        return f"({text})"
    lines, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            lines.append(text[start:index].strip())
            start = index + 1
    lines.append(text[start:].strip())
    return "(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _shown(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;")
