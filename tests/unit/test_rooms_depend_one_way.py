"""A room imports only from rooms above it; the order is the one docs/architecture.md gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import polar

ROOT = Path(polar.__file__).parent
DOCS = ROOT.parents[1] / "docs" / "architecture.md"


def rooms_in_order() -> list[str]:
    """The first column of the table under "Rooms"."""
    section = DOCS.read_text().split("\n## Rooms\n")[1].split("\n### ")[0]
    cells = re.findall(r"^\| (`.+?`) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "polar" and len(parts) > 1 else None


def test_every_room_is_in_the_table() -> None:
    present = {
        path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert present - {"__init__", "__main__"} == set(rooms_in_order())


def test_no_room_imports_from_one_below_it() -> None:
    order = {room: place for place, room in enumerate(rooms_in_order())}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in ROOT.rglob("*.py")
        if (room := file.relative_to(ROOT).parts[0].removesuffix(".py")) in order
        for module in imports(file)
        if (other := room_of(module)) in order and order[other] > order[room]
    ]
    assert not wrong
