"""Small bugs for real code, by rule: a few characters of a function change, but not its layout."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Bug:
    """One edit of a source, in bytes."""

    rule: str
    function: str
    """The function's name, qualified by the classes and functions around it."""
    start: int
    end: int
    new: str

    def applied_to(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


class Source:
    """A source whose nodes can be located in its text."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()
        self.tree = ast.parse(text)
        self._lines = [0, *accumulate(len(line) for line in self.data.splitlines(keepends=True))]

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, start: int, end: int) -> str:
        return self.data[start:end].decode()


Edit = tuple[int, int, str]
"""Start, end, and the new text."""
Rule = Callable[[ast.AST, Source], Iterator[Edit]]
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}


def comparison_changed(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _between(node.left, _COMPARISONS[type(node.ops[0])], node.comparators[0], source)


def operator_changed(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Change operators of numbers; joined or formatted text would fail at once."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        if _is_text(node.left) or _is_text(node.right):
            return
        yield from _between(node.left, _OPERATORS[type(node.op)], node.right, source)


def _between(left: ast.expr, change: tuple[str, str], right: ast.expr, source: Source) -> Iterator[Edit]:
    start, end = source.end(left), source.start(right)
    between = source.text(start, end)
    if between.count(change[0]) == 1:
        yield start, end, between.replace(*change)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def off_by_one(node: ast.AST, source: Source) -> Iterator[Edit]:
    """Change numbers that count something: in an index, a slice, a sum, a call or a comparison."""
    places: list[ast.expr | None] = []
    match node:
        case ast.Subscript(slice=ast.Slice() as part):
            places = [part.lower, part.upper]
        case ast.Subscript(slice=index):
            places = [index]
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=right):
            places = [right]
        case ast.Call(args=arguments):
            places = list(arguments)
        case ast.Compare(comparators=others):
            places = list(others)
    for place in places:
        if isinstance(place, ast.Constant) and type(place.value) is int and 0 <= place.value < 100:
            yield source.start(place), source.end(place), str(place.value + 1)


def condition_dropped(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        yield source.end(node.values[-2]), source.end(node.values[-1]), ""


def condition_turned(node: ast.AST, source: Source) -> Iterator[Edit]:
    if not isinstance(node, ast.If | ast.IfExp | ast.While):
        return
    match node.test:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield source.start(node.test), source.start(operand), ""
        case ast.Name() | ast.Attribute() | ast.Call() | ast.Subscript():
            yield source.start(node.test), source.start(node.test), "not "


def arguments_swapped(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            start, end, then, last = *_ends(first, source), *_ends(second, source)
            new = source.text(then, last) + source.text(end, then) + source.text(start, end)
            yield start, last, new


def _ends(node: ast.expr, source: Source) -> tuple[int, int]:
    return source.start(node), source.end(node)


def return_removed(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield source.start(node), source.start(node.value), ""


def truth_turned(node: ast.AST, source: Source) -> Iterator[Edit]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield *_ends(node, source), str(not node.value)


RULES: dict[str, Rule] = {
    rule.__name__: rule
    for rule in (
        arguments_swapped,
        comparison_changed,
        condition_dropped,
        condition_turned,
        off_by_one,
        operator_changed,
        return_removed,
        truth_turned,
    )
}


def possible_bugs(text: str) -> list[Bug]:
    """Return every bug that the rules make in the functions of a source, in order."""
    source = Source(text)
    bugs = [
        Bug(name, function, *edit)
        for function, node in _in_functions(source.tree, (), False)
        for name, rule in RULES.items()
        for edit in rule(node, source)
        if b"\n" not in source.data[edit[0] : edit[1]]
    ]
    return sorted(bugs, key=lambda bug: (bug.start, bug.rule))


_LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr)
"""Parts of error messages, which tests rarely check."""


def _in_functions(
    node: ast.AST, names: tuple[str, ...], inside: bool
) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield the nodes of function bodies, each with the name of its function."""
    if isinstance(node, _LEFT_ALONE):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names, inside = (*names, node.name), inside or not isinstance(node, ast.ClassDef)
        children: list[ast.AST] = [*node.body]
    else:
        if inside and isinstance(node, ast.expr | ast.stmt):
            yield ".".join(names), node
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _in_functions(child, names, inside)
