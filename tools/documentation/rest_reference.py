"""The REST reference: every route with its parameters and bodies, from the OpenAPI document."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest.mock import MagicMock

from polar import models
from polar.rollout.server import create_app
from tools.documentation.docstrings import attributes, cell, code, documentation, table, values

Document = dict[str, Any]


def page() -> str:
    # Routes are only described, never called, so they need no store.
    document: Document = create_app(MagicMock(), MagicMock()).openapi()
    return "\n\n".join(
        [
            "# REST",
            "The OpenAPI document is at `/api/v1/openapi.json` of every server; clients in any language can"
            " be generated from it. Every request needs `Authorization: Bearer TOKEN`; roles are described in"
            " [security](../security.md#tokens-and-roles). Errors are answered with a"
            " [Problem](#schema-problem).",
            *_operations(document),
            "## Schemas",
            *_schemas(document["components"]["schemas"]),
        ]
    )


def _operations(document: Document) -> Iterator[str]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"## {operation['operationId']}"
            yield f"`{method.upper()} {path}`"
            yield _whole(operation.get("description", ""))
            yield f"For: {' or '.join(operation['x-roles']) or 'anyone'}."
            if parameters := [_parameter(each) for each in operation.get("parameters", [])]:
                yield table(("parameter", "in", "type", "meaning"), parameters)
            if bodies := list(_bodies(operation)):
                yield table(("", ""), bodies)


def _parameter(parameter: Document) -> tuple[str, ...]:
    required = ", required" if parameter.get("required") else ""
    return (
        code(parameter["name"]),
        parameter["in"],
        _type(parameter["schema"]) + required,
        cell(parameter.get("description", "")),
    )


def _bodies(operation: Document) -> Iterator[tuple[str, str]]:
    if body := operation.get("requestBody"):
        yield "body", _content(body)
    for status, answer in operation["responses"].items():
        if status not in ("422", "4XX", "5XX"):  # identical for all routes
            yield status, _content(answer) or cell(answer.get("description", ""))


def _content(body: Document) -> str:
    kinds = (f"{_type(shape.get('schema', {}))} ({kind})" for kind, shape in body.get("content", {}).items())
    return ", ".join(kinds)


def _schemas(schemas: Document) -> Iterator[str]:
    classes = dict(_model_classes())
    for name, schema in sorted(schemas.items()):
        if name in ("HTTPValidationError", "ValidationError"):
            continue
        cls = classes.get(name)
        yield f"### {name} {{#schema-{name.lower()}}}"
        yield _whole(documentation(cls) if cls else schema.get("description", ""))
        if "enum" in schema:
            told = values(cls) if cls else dict.fromkeys(map(str, schema["enum"]), "")
            yield table(("value", "meaning"), [(code(value), cell(said)) for value, said in told.items()])
        told = attributes(cls) if cls else {}
        rows = [
            (
                code(field),
                _type(shape) + (", required" if field in schema.get("required", ()) else ""),
                cell(told.get(field, shape.get("description", ""))),
            )
            for field, shape in schema.get("properties", {}).items()
        ]
        if rows:
            yield table(("field", "type", "meaning"), rows)


def _model_classes() -> Iterator[tuple[str, type]]:
    for module in pkgutil.iter_modules(models.__path__):
        for name, cls in inspect.getmembers(import_module(f"polar.models.{module.name}"), inspect.isclass):
            if cls.__module__.startswith("polar.models"):
                yield name, cls


def _type(schema: Document) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#schema-{name.lower()})"
    if inner := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return " or ".join(_type(each) for each in inner)
    if "enum" in schema or "const" in schema:
        return ", ".join(code(str(value)) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping of {_type(schema['additionalProperties'])}"
    return str(schema.get("format") or schema.get("type") or "any")


def _whole(text: str) -> str:
    return text.replace("<", "&lt;")
