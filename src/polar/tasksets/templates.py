"""Task fields written as jinja2 templates over a row's columns: strict, sandboxed, compiled once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from polar.errors import InvalidInput

if TYPE_CHECKING:
    from jinja2 import Environment

_ONE_EXPRESSION = re.compile(r"^\{\{-?((?:(?!\{\{|\}\}|\{%|%\}).)+?)-?\}\}$", re.DOTALL)
TEXT_FIELDS = ("id", "instruction")
"""Always text, whatever the type of the column in them."""

Render = Callable[[Mapping[str, Any]], Any]


class TemplateProblem(InvalidInput):
    """A template could not be rendered over a row."""


def compile_template(fields: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What makes task fields of a row's columns; InvalidInput names the field whose template is wrong.

    Every text in `fields`, however deep, and every key is a template. One that is a single
    expression keeps the type of its value, so `"{{ files }}"` is a mapping if the column is one.
    """
    environment = _environment()
    parts = {
        str(name): _compiled(environment, value, str(name), keeps_type=name not in TEXT_FIELDS)
        for name, value in fields.items()
    }
    return lambda columns: {name: render(columns) for name, render in parts.items()}


def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _compiled(environment: Environment, value: Any, field: str, *, keeps_type: bool) -> Render:
    if isinstance(value, dict):
        pairs = [
            (
                _compiled(environment, str(key), field, keeps_type=False),
                _compiled(environment, inner, f"{field}.{key}", keeps_type=True),
            )
            for key, inner in value.items()
        ]
        return lambda columns: {key(columns): inner(columns) for key, inner in pairs}
    if isinstance(value, list):
        items = [
            _compiled(environment, inner, f"{field}.{place}", keeps_type=True)
            for place, inner in enumerate(value)
        ]
        return lambda columns: [item(columns) for item in items]
    if not isinstance(value, str) or not ("{{" in value or "{%" in value or "{#" in value):
        return lambda _: value
    return _text(environment, value, field, keeps_type=keeps_type)


def _text(environment: Environment, value: str, field: str, *, keeps_type: bool) -> Render:
    from jinja2 import TemplateError, Undefined

    single = _ONE_EXPRESSION.match(value) if keeps_type else None
    evaluate: Render
    try:
        if single is not None:
            evaluate = environment.compile_expression(single[1].strip(), undefined_to_none=False)
        else:
            evaluate = environment.from_string(value).render
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise InvalidInput(f"template.{field}:{f' line {line}:' if line else ''} {error}") from None

    def render(columns: Mapping[str, Any]) -> Any:
        try:
            made = evaluate(columns)
            if isinstance(made, Undefined):
                made._fail_with_undefined_error()
        except TemplateError as error:
            raise TemplateProblem(f"{field}: {error.message}") from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateProblem(f"{field}: the template fails: {error}") from None
        return made

    return render
