"""Reads docstrings of classes, and the strings below attributes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Sequence
from enum import Enum
from functools import cache


@cache
def attributes(cls: type) -> dict[str, str]:
    """Return the strings below attributes by name, including inherited ones."""
    told: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("polar"):
            told |= _own_attributes(base)
    return told


def _own_attributes(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    told = {}
    for statement, below in zip(tree.body, tree.body[1:], strict=False):
        match statement, below:
            case (
                ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                told[name] = one_line(text)
    return told


def values(enum: type[Enum]) -> dict[str, str]:
    """Return each value of an enum with its docstring."""
    told = attributes(enum)
    return {str(member.value): told.get(member.name, "") for member in enum}


def documentation(thing: object) -> str:
    """Return the docstring as Markdown, or an empty text."""
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "")


def one_line(text: str) -> str:
    return " ".join(text.split())


def cell(text: str) -> str:
    """Escape text for a table cell."""
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    return f"`{one_line(text)}`".replace("|", "\\|") if text else ""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
