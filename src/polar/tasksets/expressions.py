"""Conditions and templates over named values, both in jinja2: strict about names, and sandboxed.

reward >= 1 and components.tests > 0.5
{{ question }} Answer in {{ language | upper }}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from polar.errors import InvalidInput
from polar.models.session import SessionResult

if TYPE_CHECKING:
    from jinja2.sandbox import SandboxedEnvironment

LONGEST = 10_000
"""The maximum length of a condition in characters."""
LARGEST_POWER = 1_000
_ONE_EXPRESSION = re.compile(r"^\{\{-?((?:(?!\{\{|\}\}|\{%|%\}).)+?)-?\}\}$", re.DOTALL)
TEXT_FIELDS = ("id", "instruction")
"""Fields that are always text, whatever the type of the column."""

Names = Mapping[str, Any]
Render = Callable[[Names], Any]


class CannotJudge(InvalidInput):
    """A condition does not apply to these values: a field is missing or has another type."""


class TemplateProblem(InvalidInput): ...


@dataclass(frozen=True, slots=True)
class Condition:
    """A jinja2 expression that is true or false."""

    text: str
    _evaluate: Render

    def __call__(self, values: Names) -> bool:
        """Evaluate the condition; CannotJudge says why that is not possible."""
        return bool(_evaluate_or_raise(self._evaluate, values, CannotJudge))


def parse_condition(text: str, option: str, *, known: Collection[str] | None = None) -> Condition:
    """Parse a condition; InvalidInput names `option` and what is wrong. `known` lists the available names."""
    from jinja2 import TemplateError, meta

    if len(text) > LONGEST:
        raise InvalidInput(f"{option}: longer than {LONGEST} characters")
    environment = _environment()
    try:
        evaluate = environment.compile_expression(text, undefined_to_none=False)
        asked = meta.find_undeclared_variables(environment.parse(f"{{{{ {text} }}}}"))
    except (TemplateError, SyntaxError, ValueError) as error:
        raise InvalidInput(
            f"{option}: {getattr(error, 'message', None) or error}",
            hint="conditions are jinja2 expressions, such as reward >= 1 and metadata.level is not none",
        ) from None
    except (RecursionError, MemoryError):
        raise InvalidInput(f"{option}: nested too deeply") from None
    if "null" in asked:
        raise InvalidInput(f"{option}: jinja2 has no null", hint="write none, as in `level is none`")
    if known is not None and (unknown := sorted(asked - set(known))):
        raise InvalidInput(f"{option}: unknown name {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return Condition(text, evaluate)


def compile_template(fields: Mapping[str, Any]) -> Callable[[Names], dict[str, Any]]:
    """Return a function from a row's columns to task fields; InvalidInput names a field with a bad template.

    Every text in `fields`, at any depth, and every key is a template. A template that is a single expression
    keeps the type of its value, so `"{{ files }}"` is a mapping if the column is one.
    """
    parts = {
        str(name): _compile(value, str(name), keeps_type=name not in TEXT_FIELDS)
        for name, value in fields.items()
    }
    return lambda columns: {name: render(columns) for name, render in parts.items()}


@cache
def _environment() -> SandboxedEnvironment:
    from jinja2 import StrictUndefined
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class FieldEnvironment(ImmutableSandboxedEnvironment):
        """Reads `metadata.items` as the field of that name, never as the method of a mapping."""

        intercepted_binops = frozenset({"**", "*"})

        def getattr(self, obj: Any, attribute: str) -> Any:
            return (
                self._field(obj, attribute) if isinstance(obj, Mapping) else super().getattr(obj, attribute)
            )

        def getitem(self, obj: Any, argument: Any) -> Any:
            return self._field(obj, argument) if isinstance(obj, Mapping) else super().getitem(obj, argument)

        def _field(self, obj: Mapping[Any, Any], key: Any) -> Any:
            if key in obj:
                return obj[key]
            return self.undefined(f"unknown name {key!r}; known: {', '.join(map(str, obj)) or 'none'}")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            # An expression may take long, but a mistake must not fill the memory.
            if operator == "**" and abs(right) > LARGEST_POWER:
                raise SecurityError(f"exponents above {LARGEST_POWER} are not allowed")
            if operator == "*" and not isinstance(left, int | float) and right > LONGEST:
                raise SecurityError(f"repetitions above {LONGEST} are not allowed")
            return super().call_binop(context, operator, left, right)

    return FieldEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def _compile(value: Any, field: str, *, keeps_type: bool) -> Render:
    if isinstance(value, dict):
        pairs = [
            (
                _compile(str(key), field, keeps_type=False),
                _compile(inner, f"{field}.{key}", keeps_type=True),
            )
            for key, inner in value.items()
        ]
        return lambda columns: {key(columns): inner(columns) for key, inner in pairs}
    if isinstance(value, list):
        items = [_compile(inner, f"{field}.{place}", keeps_type=True) for place, inner in enumerate(value)]
        return lambda columns: [item(columns) for item in items]
    if not isinstance(value, str) or not ("{{" in value or "{%" in value or "{#" in value):
        return lambda _: value
    return _text(value, field, keeps_type=keeps_type)


def _text(value: str, field: str, *, keeps_type: bool) -> Render:
    from jinja2 import TemplateError

    single = _ONE_EXPRESSION.match(value) if keeps_type else None
    evaluate: Render
    try:
        if single is not None:
            evaluate = _environment().compile_expression(single[1].strip(), undefined_to_none=False)
        else:
            evaluate = _environment().from_string(value).render
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise InvalidInput(f"template.{field}:{f' line {line}:' if line else ''} {error}") from None
    return lambda columns: _evaluate_or_raise(evaluate, columns, TemplateProblem, f"{field}: ")


def _evaluate_or_raise(evaluate: Render, values: Names, problem: type[InvalidInput], where: str = "") -> Any:
    from jinja2 import TemplateError, Undefined

    try:
        made = evaluate(values)
        if isinstance(made, Undefined):
            made._fail_with_undefined_error()
    except TemplateError as error:
        there = f"; known: {', '.join(values)}" if str(error).endswith("is undefined") else ""
        raise problem(f"{where}{error.message}{there}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise problem(f"{where}{error}") from None
    return made


_OF_RESULT: dict[str, Callable[[SessionResult], Any]] = {
    "reward": lambda result: result.reward,
    "components": lambda result: result.verdict.components if result.verdict else {},
    "agent_end": lambda result: result.agent_end.value,
    "exit_code": lambda result: result.exit_code,
    "completions": lambda result: result.stats.completions,
    "traces": lambda result: result.stats.traces,
    "sampled_tokens": lambda result: result.stats.sampled_tokens,
    "trainable_tokens": lambda result: result.stats.trainable_tokens,
    "seconds": lambda result: result.seconds.running,
    "sample": lambda result: result.sample,
}
NAMES = (*_OF_RESULT, "task", "metadata")


def parse_acceptance(text: str, option: str = "--accept") -> Condition:
    """Parse `--accept`; InvalidInput names what is wrong and the available names."""
    return parse_condition(text, option, known=NAMES)


def session_names(result: SessionResult, task: str, metadata: Mapping[str, JsonValue]) -> dict[str, Any]:
    values = {name: value(result) for name, value in _OF_RESULT.items()}
    return values | {"task": task, "metadata": metadata}
