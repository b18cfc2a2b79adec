"""Measures the shape of the source against its targets.

python3 -m tools.house            prints the numbers, and always succeeds
python3 -m tools.house --check    fails if a limit is exceeded: the target, or what has been reached so far
python3 -m tools.house --lists    also names functions over 50 lines and modules with a single importer
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = "polar"
LONG_FUNCTION = 50


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    lines: int
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split(".")[1] if "." in self.name else self.name

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@dataclass(frozen=True)
class Function:
    name: str
    place: str
    lines: int


@dataclass(frozen=True)
class Measure:
    name: str
    value: int
    target: int | None = None
    note: str = ""
    limit: int | None = None
    """What is accepted until the target is reached; the target itself if unset."""

    @property
    def is_missed(self) -> bool:
        return self.target is not None and self.value > self.target

    @property
    def is_refused(self) -> bool:
        limit = self.target if self.limit is None else self.limit
        return limit is not None and self.value > limit

    def __str__(self) -> str:
        target = "" if self.target is None else f"{self.target:>9,}"
        mark = "missed" if self.is_missed else ""
        return f"{self.name:<34}{self.value:>9,}{target:>9}  {mark:<8}{self.note}".rstrip()


def read_modules(source: Path = SOURCE) -> list[Module]:
    """Read every module of the package, except links to packaged examples, which are data."""
    modules = []
    for path in sorted((source / PACKAGE).rglob("*.py")):
        text = path.read_text()
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(Module(name, path.relative_to(source.parent), text.count("\n"), ast.parse(text)))
    return modules


def functions(modules: list[Module]) -> list[Function]:
    """Return every function and method, the longest first."""
    found = [
        Function(node.name, f"{module.path}:{node.lineno}", (node.end_lineno or 0) - node.lineno + 1)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sorted(found, key=lambda function: -function.lines)


def top_names(modules: list[Module]) -> set[str]:
    """Return the names in the package's own folder."""
    names = {module.room for module in modules if "." in module.name}
    return {name for name in names if not name.startswith("__")}


def duplicate_classes(modules: list[Module]) -> dict[str, list[str]]:
    """Return class names used in several modules, with those modules; `X` and `_X` are one name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(module.name)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def imported_by(module: Module, names: set[str]) -> Iterator[str]:
    """Yield the modules of the package that this one imports, at the top or inside functions."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in names else node.module


def single_importers(modules: list[Module]) -> dict[str, str]:
    """Return the modules that exactly one other module imports, with that importer."""
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in imported_by(module, names):
            if name != module.name:
                importers[name].add(module.name)
    packages = {module.name for module in modules if module.is_package}
    return {
        name: next(iter(found))
        for name, found in sorted(importers.items())
        if len(found) == 1 and name in names and name not in packages
    }


def measures(modules: list[Module]) -> list[Measure]:
    longest = functions(modules)
    over = [function for function in longest if function.lines > LONG_FUNCTION]
    first = longest[0]
    return [
        Measure("lines of source", sum(module.lines for module in modules), 45_000, limit=61_700),
        Measure("files", len(modules), 320, limit=322),
        Measure("names at the top of the package", len(top_names(modules)), 26),
        Measure("longest function", first.lines, 80, f"{first.name}, {first.place}"),
        Measure(f"functions over {LONG_FUNCTION} lines", len(over)),
        Measure("class names used twice", len(duplicate_classes(modules)), 0),
        Measure("modules with a single importer", len(single_importers(modules))),
    ]


def print_rooms(modules: list[Module]) -> None:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for module in modules:
        lines[module.room] += module.lines
        files[module.room] += 1
    print(f"\n{'room':<20}{'lines':>9}{'files':>7}")
    for room, count in lines.most_common():
        print(f"{room:<20}{count:>9,}{files[room]:>7}")


def print_lists(modules: list[Module]) -> None:
    print(f"\nFunctions over {LONG_FUNCTION} lines")
    for function in functions(modules):
        if function.lines > LONG_FUNCTION:
            print(f"  {function.lines:>4}  {function.name:<34} {function.place}")
    print("\nModules with a single importer")
    for name, importer in single_importers(modules).items():
        print(f"  {name:<44} {importer}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if a measure exceeds its limit")
    parser.add_argument("--lists", action="store_true", help="list long functions and single importers")
    arguments = parser.parse_args()
    modules = read_modules()
    found = measures(modules)
    print(f"{'':<34}{'now':>9}{'target':>9}")
    for measure in found:
        print(measure)
    print_rooms(modules)
    print("\nClass names used twice")
    for name, places in duplicate_classes(modules).items():
        print(f"  {name:<28} {', '.join(places)}")
    if arguments.lists:
        print_lists(modules)
    return int(arguments.check and any(measure.is_refused for measure in found))


if __name__ == "__main__":
    sys.exit(main())
