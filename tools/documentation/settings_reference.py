"""The settings reference: every setting with its type, default and meaning, from the models."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from polar.config import plugins, settings
from polar.training.settings import GrpoSettings, SftSettings
from tools.documentation.docstrings import attributes, cell, code, documentation, table, values

PLUGINS = (
    ("harnesses", "Harnesses"),
    ("runtimes", "Runtimes"),
    ("evaluators", "Evaluators"),
    ("builders", "Builders"),
    ("branchings", "Branching strategies"),
    ("tasksets", "Taskset formats"),
)
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<", "min_length": "length ≥", "max_length": "length ≤"}


def configuration_page() -> str:
    return "\n\n".join(
        [
            "# Configuration",
            "One YAML file: `--config FILE`, else `$POLAR_CONFIG`, else `./polar.yaml`."
            " Every setting is optional. Unknown keys are errors. Command-line options override environment"
            " variables, which override the file.",
            "```yaml\nserver: {port: 8700}\nengine: {url: http://127.0.0.1:8000}\nnode: {run_slots: 16}\n```",
            *_sections(settings.Settings, ""),
            "## Environment",
            table(("variable", "meaning"), list(_variables())),
        ]
    )


def training_page() -> str:
    return "\n\n".join(
        [
            "# Training runs",
            "The settings file of [`polar train`](../training.md). Unknown keys are errors.",
            *_sections(GrpoSettings, "", title="A run"),
            "# Fine-tuning runs",
            "The settings file of `polar train sft`. Sections with the same names as above are identical.",
            _fields(SftSettings),
        ]
    )


def options_page() -> str:
    parts = [
        "# Options of components",
        "The `options` of a task's harness, runtime, evaluator, builder and `branching.at`, and of a"
        " taskset's format. Those of plug-ins are validated the same way.",
    ]
    for group, title in PLUGINS:
        parts.append(f"## {title}")
        for name in sorted(plugins.names(group)):
            component = plugins.load(group, name)
            told = documentation(component) or documentation(inspect.getmodule(component))
            parts += [f"### `{name}`", told, _fields(component.Options) or "No options."]
    return "\n\n".join(parts)


def _sections(model: type[BaseModel], path: str, title: str | None = None) -> Iterator[str]:
    """Yield a table for each model, followed by those of the models in its fields."""
    if path or title:
        yield f"## {title or path}"
    if told := documentation(model):
        yield told
    yield _fields(model)
    for name, field in model.model_fields.items():
        for inner in _models(field.annotation):
            yield from _sections(inner, f"{path}.{name}" if path else name)


def _fields(model: type[BaseModel]) -> str:
    told = attributes(model)
    rows = [
        (
            code(name),
            _kind(field.annotation) + _limits(field),
            _default(field),
            _meaning(field, told.get(name)),
        )
        for name, field in model.model_fields.items()
    ]
    return table(("name", "kind", "default", "meaning"), rows) if rows else ""


def _meaning(field: FieldInfo, told: str | None) -> str:
    """Return the field's own description, else that of the values it takes."""
    if told is not None:
        return cell(told)
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, Enum):
        return cell(" ".join(f"`{value}`: {said}" for value, said in values(kind).items() if said))
    return cell(" ".join(documentation(model).split("\n\n")[0] for model in _models(kind)))


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _kind(annotation: Any) -> str:
    """Return an annotation in terms of YAML."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(inner[0])
    if origin is Literal:
        return ", ".join(code(str(value)) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_kind(each) for each in inner if each is not NoneType)
    if origin in (tuple, list, set, frozenset):
        return f"list of {_kind(inner[0])}"
    if origin is dict or getattr(origin, "__name__", "") == "Mapping":
        return f"mapping of {_kind(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(code(str(each.value)) for each in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {str: "text", int: "integer", float: "number", bool: "yes or no"}
    names |= dict.fromkeys((Path, PurePosixPath), "path")
    return names.get(annotation, "any")


def _limits(field: FieldInfo) -> str:
    found = [
        f"{sign} {getattr(limit, name):,}"
        for limit in field.metadata
        for name, sign in LIMITS.items()
        if hasattr(limit, name)
    ]
    return f", {' '.join(found)}" if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    if isinstance(value, tuple):
        value = list(value)
    return code(json.dumps(value, default=str, ensure_ascii=False).strip('"'))


def _variables() -> Iterator[tuple[str, str]]:
    """Yield environment variables with their descriptions, from the one module that reads them."""
    told: dict[str, str] = {}
    for name, function in inspect.getmembers(settings, inspect.isfunction):
        if function.__module__ == settings.__name__ and not name.startswith("_"):
            for variable in re.findall(r"\$(POLAR_\w+)", function.__doc__ or ""):
                told.setdefault(variable, documentation(function).split("\n\n")[0])
    for model in (settings.Settings, settings.TelemetrySettings):
        for field, meaning in attributes(model).items():
            for variable in re.findall(r"\$(POLAR_\w+)", meaning):
                told.setdefault(variable, f"`{field}`: {meaning}")
    for variable, meaning in sorted(told.items()):
        yield code(variable), cell(meaning)
