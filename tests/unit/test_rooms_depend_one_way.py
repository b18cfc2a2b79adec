"""Rooms keep to the table in docs/architecture.md: the order of imports, "must not" and "alone uses"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import polar

ROOT = Path(polar.__file__).parent
DOCS = ROOT.parents[1] / "docs" / "architecture.md"


@dataclass(frozen=True)
class Room:
    name: str
    must_not: tuple[str, ...]
    alone: tuple[str, ...]


@dataclass(frozen=True)
class Use:
    """A name that a file imports or reaches through an import, such as `os.environ`."""

    file: Path
    line: int
    name: str

    @property
    def room(self) -> str:
        return self.file.relative_to(ROOT).parts[0].removesuffix(".py")

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} uses {self.name}"


@cache
def section() -> str:
    return DOCS.read_text().split("\n## Rooms\n")[1].split("\n### ")[0]


def backticked(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([\w./]+)`", text))


@cache
def rooms() -> list[Room]:
    """The rows of the table under "Rooms", in order."""
    found = []
    for row in re.findall(r"^\| (`.+?`.*) \|$", section(), re.MULTILINE):
        names, _, must_not, alone = (cell.strip() for cell in f"{row} ".split("|"))
        clauses = tuple(clause for clause in must_not.split("; ") if clause)
        found += [Room(name, clauses, backticked(alone)) for name in backticked(names)]
    return found


@cache
def listed(words: str) -> tuple[str, ...]:
    """What the page says that words like "do I/O" stand for."""
    definition = re.search(rf"^- \*\*{re.escape(words)}\*\* is to (.*)$", section(), re.MULTILINE)
    assert definition, f"{DOCS.name} does not say what {words!r} means"
    return backticked(definition[1])


@cache
def room_names() -> frozenset[str]:
    return frozenset(room.name for room in rooms())


def qualified(name: str) -> str:
    """A name of the table as imports write it: rooms and what is in them are of this package."""
    return f"polar.{name}" if name.split(".")[0] in room_names() else name


@cache
def uses() -> tuple[Use, ...]:
    return tuple(use for file in sorted(ROOT.rglob("*.py")) for use in uses_in(file))


def uses_in(file: Path) -> Iterator[Use]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (Use(file, node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (Use(file, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield Use(file, node.lineno, f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield Use(file, node.lineno, node.func.id)


def room_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "polar" and len(parts) > 1 else None


def is_of(use: Use, names: tuple[str, ...]) -> bool:
    return any(use.name == name or use.name.startswith(f"{name}.") for name in names)


def breaks(use: Use, clause: str) -> bool:
    if clause.startswith("import rooms other than "):
        other = room_of(use.name)
        return other not in (None, use.room, *backticked(clause)) and other in room_names()
    names = backticked(clause) if clause.startswith("import ") else listed(clause)
    return is_of(use, tuple(map(qualified, names)))


def answers() -> list[tuple[str, str, str]]:
    """The rows of the table under "Where do I find …"."""
    part = DOCS.read_text().split("\n### Where do I find …\n")[1].split("\n### ")[0]
    return re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", part, re.MULTILINE)


@pytest.mark.parametrize(("question", "file", "name"), answers())
def test_what_is_looked_for_is_where_the_page_says(question: str, file: str, name: str) -> None:
    path = ROOT / file
    assert path.is_file(), f"{DOCS.name}: {question}: there is no {file}"
    found = re.search(rf"\b{re.escape(name)}\b", path.read_text())
    assert found, f"{DOCS.name}: {question}: {name} is not in {file}"


def test_every_room_is_in_the_table() -> None:
    present = {
        path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert present - {"__init__", "__main__"} == room_names()


def test_no_room_imports_from_one_below_it() -> None:
    order = {room.name: place for place, room in enumerate(rooms())}
    wrong = [
        str(use)
        for use in uses()
        if use.room in order and (other := room_of(use.name)) in order and order[other] > order[use.room]
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("room", "clause"), [(room.name, clause) for room in rooms() for clause in room.must_not]
)
def test_no_room_does_what_it_must_not(room: str, clause: str) -> None:
    assert not [
        f"{use}: {room} must not {clause}" for use in uses() if use.room == room and breaks(use, clause)
    ]


@pytest.mark.parametrize(("room", "name"), [(room.name, name) for room in rooms() for name in room.alone])
def test_what_a_room_alone_uses_is_used_nowhere_else(room: str, name: str) -> None:
    found = [use for use in uses() if is_of(use, (name,))]
    assert [use for use in found if use.room == room], f"{room} does not use {name}"
    assert not [f"{use}: only {room} may" for use in found if use.room != room]
