"""Whatever the package imports is named in pyproject.toml: a fresh environment has nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import polar

ROOT = Path(polar.__file__).parent
PROJECT = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]

# Rooms that are only ever imported with the extra installed, and the extra's name.
NEEDS = {"engines/embedded": "engine", "training": "train", "app/fleet": "ray", "telemetry/spans": "otel"}

# Comes with a declared package, as part of its interface.
CARRIED = {"starlette": "fastapi", "huggingface-hub": "tokenizers"}

# Never installed with Polar, for it chooses its own torch: looked for before a run that needs it.
BROUGHT = {"vllm"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}


ALWAYS = named(PROJECT["dependencies"])
EXTRAS = {extra: named(wanted) for extra, wanted in PROJECT["optional-dependencies"].items()}


def third_party(tree: ast.AST, *, lazily: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported package, and whether the import waits until a function is called."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules = [node.module]
        for module in modules:
            top = module.partition(".")[0]
            if top != "polar" and top not in sys.stdlib_module_names:
                yield top, lazily
        deferred = lazily or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from third_party(node, lazily=deferred)


def allowed(place: str, *, lazily: bool) -> set[str]:
    if lazily:
        return ALWAYS.union(BROUGHT, *(names for extra, names in EXTRAS.items() if extra != "dev"))
    extras = (extra for room, extra in NEEDS.items() if place.startswith(room))
    return ALWAYS.union(*(EXTRAS[extra] for extra in extras))


def test_every_import_is_a_declared_dependency() -> None:
    distributions = packages_distributions()
    undeclared = set()
    for file in ROOT.rglob("*.py"):
        place = str(file.relative_to(ROOT))
        for module, lazily in third_party(ast.parse(file.read_text())):
            names = {normal(name) for name in distributions.get(module, [module])}
            names |= {CARRIED[name] for name in names if name in CARRIED}
            if not names & allowed(place, lazily=lazily):
                undeclared.add(f"{place} imports {module}")
    assert not undeclared
