"""Files in a workspace that would make a test runner lie: found, undone and reported.

Tests import the code under test, so a determined program can always lie to its runner. What can be kept out
is everything that changes the runner from outside that code.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from polar.evaluators.inside import UngradableWorkspace, place_file, private_directory, run_script
from polar.runtimes.base import PathRefused, Sandbox, SandboxError

STEERING = (
    *("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "unittest.cfg", "nose2.cfg"),
    *("sitecustomize.*", "usercustomize.*", "sitecustomize/*", "usercustomize/*", "*.pth", "*.egg-link"),
    *("*.config.[jt]s", "*.config.[cm][jt]s", "*.config.json", "*.workspace.[jt]s", "*.workspace.json"),
    *(".*rc", ".*rc.*", ".pnp.*", "bunfig.toml", "deno.json", "deno.jsonc", "karma.conf.*", "setuptests.*"),
    *(".cargo/*", "rust-toolchain", "rust-toolchain.toml", "build.rs", "go.work"),
    *(".mvn/*", "junit-platform.properties", ".rspec", "phpunit.xml", "phpunit.xml.dist"),
)
"""Names, in any case, of files that a runner obeys wherever they are; honest work rarely has any."""
MAKEFILES = ("makefile", "gnumakefile")
"""Makefiles steer only if the task itself has one; otherwise they are ordinary files."""
SETTINGS = (
    *("pyproject.toml", "setup.cfg", "tox.ini", "package.json", "cargo.toml"),
    *("*.dist-info/entry_points.txt", "*.egg-info/entry_points.txt"),
    *("tests/*__init__.*", "test/*__init__.*"),
)
"""Files that honest work changes too. Only their runner settings count; for a package's `__init__` among
the tests, which is imported first, everything but its existence counts."""
INSTALLED = ("node_modules", ".venv", "venv", ".tox", ".nox", "__pycache__", ".pytest_cache")
"""Directories of installed or cached files: those of the task's sandbox are used, never the agent's."""
GUARDED = (*STEERING, *MAKEFILES, *SETTINGS)

RUNNERS = frozenset(
    {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "xdist", "py", "nose2", "hypothesis"}
)
SHADOWING = (frozenset(sys.stdlib_module_names) | RUNNERS | {"__init__"}) - {"test", "this", "antigravity"}
"""Modules that a file of the same name at the top of the workspace would replace. `__init__` turns the
workspace into a package, which pytest imports before its tests."""
_MODULE_SUFFIXES = ("", ".py", ".pyc", ".so")
_PYTHON_TOOLS = ("pytest", "coverage", "tox", "hatch", "pdm", "poe", "taskipy")
_INI_SECTIONS = ("pytest", "tool:pytest", "tox", "testenv", "coverage:", "unittest", "nose")
_HONEST_PACKAGE = frozenset(
    {
        *("name", "version", "description", "keywords", "author", "contributors", "license", "repository"),
        *("bugs", "homepage", "private", "type", "main", "module", "types", "typings", "exports", "files"),
        *("bin", "engines", "dependencies", "devDependencies", "peerDependencies", "optionalDependencies"),
    }
)
_HONEST_CARGO = frozenset({"dependencies", "dev-dependencies", "build-dependencies", "features", "target"})
_STEERING_CRATE = ("autotests", "build", "links", "workspace")


def shadows(name: str) -> bool:
    """Whether something of this name at the top of the workspace replaces a module of the runner."""
    stem, dot, rest = name.partition(".")
    return stem in SHADOWING and f"{dot}{rest.rpartition('.')[2]}" in _MODULE_SUFFIXES


def is_makefile(path: str) -> bool:
    return PurePosixPath(path).name.lower() in MAKEFILES


def is_named_by(path: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches a path and ends in its exact name, so that its author meant that file."""
    name = PurePosixPath(path).name
    # As in find, `*` in a pattern also matches `/`.
    return any(
        PurePosixPath(pattern).name == name and fnmatchcase(path, pattern.removeprefix("./"))
        for pattern in patterns
    )


def find_expression(patterns: Sequence[str]) -> list[str]:
    """Return the `find` arguments that print guarded files and those that the patterns match."""
    tests: list[tuple[str, ...]] = [
        ("-ipath", f"*/{name}") if "/" in name else ("-iname", name) for name in GUARDED
    ]
    # A link named like a guarded file's directory may point to a directory of any name.
    parents = {name.rpartition("/")[0] for name in GUARDED if "/" in name}
    tests += [("-type", "l", "-iname", parent) for parent in sorted(parents)]
    tests += [("-path", f"./{pattern.removeprefix('./')}") for pattern in patterns]
    return [word for test in tests for word in ("-o", *test)][1:]


def rivals(paths: Iterable[str]) -> Iterator[str]:
    """Yield patterns of hidden files' paths, and of what a runner might load in their place."""
    for path in paths:
        yield literal(path)
        pure = PurePosixPath(path)
        if path.endswith("_test.go"):
            yield f"{literal(str(pure.parent))}/*_test.go"
        elif pure.suffix == ".py":
            stem = literal(str(pure.with_suffix("")))
            yield from (stem, f"{stem}/*", f"{stem}.so", f"{stem}.*.so")


def literal(path: str) -> str:
    """Return a pattern that matches only this path."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def essence(path: str, content: bytes | None) -> object:
    """Return the part of a file that a runner obeys: its runner settings, or all of it."""
    if content is None or not is_settings(path):
        return content
    try:
        return _READERS[PurePosixPath(path).name.lower()](content.decode())
    except (ValueError, AttributeError, TypeError, configparser.Error, RecursionError):
        return content


def is_settings(path: str) -> bool:
    return PurePosixPath(path).name.lower() in _READERS


def _pyproject(text: str) -> object:
    tools = tomllib.loads(text).get("tool", {})
    return {name: tools[name] for name in _PYTHON_TOOLS if name in tools}


def _package(text: str) -> object:
    document: dict[str, Any] = json.loads(text or "{}")
    return {key: value for key, value in document.items() if key not in _HONEST_PACKAGE and value}


def _crate(text: str) -> object:
    document = tomllib.loads(text)
    package = document.pop("package", {})
    rest = {key: value for key, value in document.items() if key not in _HONEST_CARGO}
    return rest, {key: package[key] for key in _STEERING_CRATE if key in package}


def _ini(text: str) -> object:
    parser = _parse_ini(text)
    return {name: dict(parser[name]) for name in parser.sections() if name.startswith(_INI_SECTIONS)}


def _entry_points(text: str) -> object:
    parser = _parse_ini(text)
    return {name: dict(parser[name]) for name in parser.sections() if not name.endswith("_scripts")}


def _parse_ini(text: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    return parser


_READERS: dict[str, Callable[[str], object]] = {
    "__init__.py": str.strip,
    "pyproject.toml": _pyproject,
    "package.json": _package,
    "cargo.toml": _crate,
    "setup.cfg": _ini,
    "tox.ini": _ini,
    "entry_points.txt": _entry_points,
}


MAX_FILES = 5_000
SHOWN_FINDINGS = 50
MAX_FILE_BYTES = 4 * 1024 * 1024


class TamperPolicy(StrEnum):
    """How to react to tampering, which is always reported."""

    REPORT = "report"
    NEUTRALISE = "neutralise"
    """Changed files are restored, added ones removed, then the tests run."""
    ZERO = "zero"
    """The reward is 0."""


class Tampered(UngradableWorkspace):
    """The agent left files that steer its grading, and the task's policy gives that no reward."""

    def __init__(self, findings: Sequence[TamperingFound]) -> None:
        super().__init__("the agent tampered with files that decide its reward")
        self.findings = tuple(findings)


class Change(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class TamperingFound:
    path: str
    change: Change

    def __str__(self) -> str:
        shown = os.fsencode(self.path).decode(errors="replace").replace("\n", "\\n")
        return f"{self.change} {shown}"


def tampering_remarks(findings: Sequence[TamperingFound]) -> list[str]:
    shown = [f"tampering: {finding}" for finding in findings[:SHOWN_FINDINGS]]
    more = len(findings) - len(shown)
    return [*shown, f"tampering: {more} more"] if more else shown


Inventory = Mapping[str, bytes | None]
"""The content of guarded paths of a workspace; None for a directory, a link or anything else."""

END = "end of the list"


async def take_inventory(sandbox: Sandbox, protect: Sequence[str], *, timeout: float) -> Inventory:
    words = (" -o ".join(f"-name {name}" for name in INSTALLED), *find_expression(protect))
    result = await run_script(sandbox, "inventory", *words, timeout=timeout, must_succeed=True)
    listing = result.stdout.read().decode(errors="surrogateescape")
    if not listing.endswith(f"\0{END}"):
        raise UngradableWorkspace("the agent left too many files to check")
    top, _, rest = f"\0{listing.removesuffix(END)}".partition("\0\0")
    found: dict[str, bytes | None] = {name: None for name in _paths(top) if shadows(name)}
    paths = _paths(rest)
    if len(paths) > MAX_FILES:
        raise UngradableWorkspace(f"the workspace has more than {MAX_FILES} guarded files")
    for path in paths:
        found[path] = await _content(sandbox, path)
    return found


def _paths(listing: str) -> list[str]:
    return [path.removeprefix("./") for path in listing.split("\0") if path]


async def _content(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.download(sandbox.workspace / path, max_bytes=MAX_FILE_BYTES)
    except PathRefused:
        return None
    except SandboxError as error:
        raise UngradableWorkspace(f"a guarded file cannot be read: {error}") from error


def compare(before: Inventory, after: Inventory, allow: Sequence[str] = ()) -> tuple[TamperingFound, ...]:
    """Return the changes that were not explicitly allowed, sorted by path."""
    changes = ((path, _change(path, before, after)) for path in sorted(before.keys() | after.keys()))
    return tuple(
        TamperingFound(path, change) for path, change in changes if change and not is_named_by(path, allow)
    )


def _change(path: str, before: Inventory, after: Inventory) -> Change | None:
    if path not in before:
        return None if _is_harmless(path, before, after[path]) else Change.ADDED
    if path not in after:
        return None if shadows(path) else Change.REMOVED
    return Change.CHANGED if essence(path, before[path]) != essence(path, after[path]) else None


def _is_harmless(path: str, before: Inventory, content: bytes | None) -> bool:
    """Whether an added file tells a runner nothing, or is a makefile in a task without one."""
    if is_makefile(path):
        return not any(map(is_makefile, before))
    return is_settings(path) and essence(path, content) == essence(path, b"")


async def undo(
    sandbox: Sandbox, findings: Sequence[TamperingFound], before: Inventory, *, timeout: float
) -> None:
    """Restore what was changed or removed, and remove what was added."""
    paths = b"".join(os.fsencode(f"./{finding.path}") + b"\0" for finding in findings)
    now = str(private_directory(sandbox))
    result = await run_script(sandbox, "undo", now, timeout=timeout, stdin=paths)
    if result.exit_code != 0:
        raise UngradableWorkspace("files that the agent added for test runners cannot be removed")
    for finding in findings:
        content = before.get(finding.path)
        if content is not None:
            await place_file(sandbox, sandbox.workspace / finding.path, content)
