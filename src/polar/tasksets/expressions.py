"""Conditions that users write, such as `reward >= 1 and components.tests > 0.5`: parsed, never run as code.

There are names, fields (`metadata.level`, `metadata["level"]`), numbers, strings, `true`, `false`, `none`,
lists, comparisons (`==`, `!=`, `<`, `<=`, `>`, `>=`, `in`, `not in`), `and`, `or`, `not` and a sign.
There are no calls and no arithmetic, so a condition cannot do anything but hold or not hold.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from polar.errors import InvalidInput

LONGEST = 10_000
_CONSTANTS = {"true": True, "false": False, "none": None, "null": None}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: lambda left, right: left is right,
    ast.IsNot: lambda left, right: left is not right,
}

Names = Mapping[str, Any]
_Node = Callable[[Names], Any]


class CannotJudge(InvalidInput):
    """A condition does not apply to these values: a field is missing, or has another type."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition."""

    text: str
    names: frozenset[str]
    """Every name it begins a field with."""
    _holds: _Node

    def __call__(self, values: Names) -> bool:
        """Whether it holds for these values; CannotJudge names what is missing."""
        return bool(self._holds(values))


def parse_condition(text: str, option: str, *, known: Collection[str] | None = None) -> Condition:
    """The condition in `text`; InvalidInput names `option` and the column of what is wrong.

    `known`: the names there will be; None where only the data tell.
    """
    if len(text) > LONGEST:
        raise InvalidInput(f"{option}: longer than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        column = error.offset or len(text.strip()) + 1
        raise InvalidInput(f"{option}: column {column}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidInput(f"{option}: not a condition: {error}") from None
    parser = _Parser(option, known)
    try:
        holds = parser.node(tree.body)
    except RecursionError:
        raise InvalidInput(f"{option}: nested too deeply") from None
    return Condition(text, frozenset(parser.names), holds)


class _Parser:
    """Turns a syntax tree into closures; what it has no case for is refused with its column."""

    def __init__(self, option: str, known: Collection[str] | None) -> None:
        self._option = option
        self._known = known
        self.names: set[str] = set()

    def node(self, tree: ast.expr) -> _Node:
        match tree:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return lambda _: value
            case ast.Name(id=name):
                return self._name(tree, name)
            case ast.Attribute(value=inner, attr=name):
                return _field(self.node(inner), name)
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as key)):
                return _field(self.node(inner), key)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = [self.node(item) for item in items]
                return lambda values: [part(values) for part in parts]
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                operand = self.node(inner)
                return lambda values: not operand(values)
            case ast.UnaryOp(
                op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as n)
            ):
                number = -n if isinstance(sign, ast.USub) else n
                return lambda _: number
            case ast.BoolOp(op=joint, values=operands):
                return _joined([self.node(part) for part in operands], isinstance(joint, ast.And))
            case ast.Compare(left=left, ops=ops, comparators=rights):
                return self._comparison(left, ops, rights)
        raise self._refusal(tree, f"{_kind(tree)} not allowed")

    def _name(self, tree: ast.expr, name: str) -> _Node:
        if name in _CONSTANTS:
            value = _CONSTANTS[name]
            return lambda _: value
        if self._known is not None and name not in self._known:
            raise self._refusal(tree, f"no {name!r} here; there are {', '.join(sorted(self._known))}")
        self.names.add(name)

        def look_up(values: Names) -> Any:
            if name not in values:
                raise CannotJudge(f"there is no {name!r}; there are {', '.join(map(str, values)) or 'none'}")
            return values[name]

        return look_up

    def _comparison(self, left: ast.expr, ops: list[ast.cmpop], rights: list[ast.expr]) -> _Node:
        operands = [self.node(part) for part in (left, *rights)]
        compare = [_COMPARISONS[type(op)] for op in ops]

        def holds(values: Names) -> bool:
            found = [operand(values) for operand in operands]
            try:
                return all(check(found[at], found[at + 1]) for at, check in enumerate(compare))
            except TypeError:
                kinds = " and ".join("nothing" if value is None else type(value).__name__ for value in found)
                raise CannotJudge(f"{ast.unparse(left)}: {kinds} cannot be compared") from None

        return holds

    def _refusal(self, tree: ast.expr, message: str) -> InvalidInput:
        return InvalidInput(f"{self._option}: column {tree.col_offset + 1}: {message}")


def _field(inner: _Node, key: str | int) -> _Node:
    def look_up(values: Names) -> Any:
        holder = inner(values)
        if isinstance(holder, Mapping):
            if key in holder:
                return holder[key]
            raise CannotJudge(f"there is no {key!r}; there are {', '.join(map(str, holder)) or 'none'}")
        if isinstance(holder, list | tuple | str) and isinstance(key, int):
            if -len(holder) <= key < len(holder):
                return holder[key]
            raise CannotJudge(f"there is no place {key}")
        raise CannotJudge(f"{key!r} asked of something that has no fields")

    return look_up


def _joined(parts: list[_Node], is_and: bool) -> _Node:
    if is_and:
        return lambda values: all(part(values) for part in parts)
    return lambda values: any(part(values) for part in parts)


def _kind(tree: ast.expr) -> str:
    match tree:
        case ast.Call():
            return "calls are"
        case ast.BinOp():
            return "arithmetic is"
        case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return "functions and loops are"
        case _:
            return f"{type(tree).__name__} is"
