"""What an agent can leave in a workspace to make a test runner lie; found, undone and reported.

Tests import the code under test, so a program that is bent on it can always lie to its runner. What
can be kept out is everything that changes the runner from outside that code.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.inside import UNLOCK, Spoiled, must_run, place_file, run_script
from polar.models.task import TaskSpec
from polar.runtimes.base import PathRefused, Sandbox, SandboxError

GUARDED_NAMES = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    "jest.config.*",
    "vitest.config.*",
    ".npmrc",
    ".cargo/config",
    ".cargo/config.toml",
)
"""Files that a runner obeys wherever they are."""
SETTINGS_NAMES = ("pyproject.toml", "setup.cfg", "tox.ini", "package.json")
"""Files that honest work changes too; only what they tell a test runner counts."""
RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "xdist"})
SHADOWABLE = (frozenset(sys.stdlib_module_names) | RUNNERS) - {"test", "this", "antigravity"}
"""Modules that a file of the same name at the top of the workspace would stand in for."""
_MODULE_SUFFIXES = ("", ".py", ".pyc", ".so")
MAX_FILES = 5_000
SHOWN_FINDINGS = 50
MAX_FILE_BYTES = 4 * 1024 * 1024


class TamperPolicy(StrEnum):
    """What follows from tampering; it is reported in any case."""

    REPORT = "report"
    NEUTRALISE = "neutralise"
    """Files are put back as the task had them, added ones are removed, then the tests run."""
    ZERO = "zero"
    """The reward is 0."""


class Change(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Finding:
    path: str
    change: Change

    def __str__(self) -> str:
        shown = os.fsencode(self.path).decode(errors="replace").replace("\n", "\\n")
        return f"{self.change} {shown}"


def tampering_remarks(findings: Sequence[Finding]) -> list[str]:
    """What to tell a person of it, a line each."""
    shown = [f"tampering: {finding}" for finding in findings[:SHOWN_FINDINGS]]
    more = len(findings) - len(shown)
    return [*shown, f"tampering: {more} more"] if more else shown


Inventory = Mapping[str, bytes | None]
"""Guarded paths of a workspace → their content; None for a directory, a link or anything else."""

END = "end of the list"
_LIST = rf"""
{UNLOCK}
find . -mindepth 1 -maxdepth 1 -print0
printf '\0'
find . -path './.git/hooks/*' ! -name '*.sample' -print0
find . -path ./.git -prune -o ! -type d \( "$@" \) -print0
printf '{END}'
"""


async def take_inventory(sandbox: Sandbox, protect: Sequence[str], *, timeout: float) -> Inventory:
    """Every path of the workspace that guards look at."""
    tests = [("-path", f"*/{name}") for name in (*GUARDED_NAMES, *SETTINGS_NAMES)]
    tests += [("-path", f"./{pattern.removeprefix('./')}") for pattern in protect]
    expression = [word for test in tests for word in ("-o", *test)][1:]
    result = await must_run(sandbox, _LIST, *expression, timeout=timeout, name="evaluator-inventory")
    listing = result.stdout.read_bytes().decode(errors="surrogateescape")
    if not listing.endswith(f"\0{END}"):
        raise Spoiled("the agent left more files than can be looked at")
    top, _, rest = f"\0{listing.removesuffix(END)}".partition("\0\0")
    found: dict[str, bytes | None] = {name: None for name in _paths(top) if _is_shadow(name)}
    paths = _paths(rest)
    if len(paths) > MAX_FILES:
        raise Spoiled(f"more than {MAX_FILES} files that guards must look at")
    for path in paths:
        found[path] = await _content(sandbox, path)
    return found


def _paths(listing: str) -> list[str]:
    return [path.removeprefix("./") for path in listing.split("\0") if path]


def _is_shadow(name: str) -> bool:
    stem, dot, rest = name.partition(".")
    return stem in SHADOWABLE and f"{dot}{rest.rpartition('.')[2]}" in _MODULE_SUFFIXES


async def _content(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.download(sandbox.workspace / path, max_bytes=MAX_FILE_BYTES)
    except PathRefused:
        return None
    except SandboxError as error:
        raise Spoiled(f"a guarded file cannot be read: {error}") from error


def inventory_of_task(task: TaskSpec, protect: Sequence[str]) -> Inventory:
    """The inventory of a workspace that holds the task's files and nothing else."""
    found: dict[str, bytes | None] = {}
    for path, file in task.files.items():
        pure = PurePosixPath(path)
        if _is_shadow(pure.parts[0]):
            found[pure.parts[0]] = None
        if any(pure.match(name) for name in (*GUARDED_NAMES, *SETTINGS_NAMES)) or matches(path, protect):
            found[str(pure)] = file.data
    return found


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches one of the patterns, in which `*` also stands for `/`, as in find."""
    return any(fnmatchcase(path, pattern.removeprefix("./")) for pattern in patterns)


def literal(path: str) -> str:
    """A pattern that only this path matches."""
    return re.sub(r"([*?\[])", r"[\1]", path)


def compare(before: Inventory, after: Inventory) -> tuple[Finding, ...]:
    """What is different, in the order of the paths."""
    findings = []
    for path in sorted(before.keys() | after.keys()):
        if path not in before:
            if not _is_harmless(path, after[path]):
                findings.append(Finding(path, Change.ADDED))
        elif path not in after:
            if not _is_shadow(path):
                findings.append(Finding(path, Change.REMOVED))
        elif _essence(path, before[path]) != _essence(path, after[path]):
            findings.append(Finding(path, Change.CHANGED))
    return tuple(findings)


def _is_harmless(path: str, content: bytes | None) -> bool:
    """A settings file that tells a test runner nothing."""
    return PurePosixPath(path).name in SETTINGS_NAMES and _essence(path, content) == _essence(path, b"")


def _essence(path: str, content: bytes | None) -> object:
    """What of a file a test runner obeys: its settings in a file that has others too, else all of it."""
    name = PurePosixPath(path).name
    if content is None or name not in SETTINGS_NAMES:
        return content
    try:
        text = content.decode()
        match name:
            case "pyproject.toml":
                return tomllib.loads(text).get("tool", {}).get("pytest", {})
            case "package.json":
                document = json.loads(text or "{}")
                scripts = document.get("scripts", {})
                return (document.get("jest", {}), *map(scripts.get, ("pretest", "test", "posttest")))
            case _:
                parser = configparser.RawConfigParser(strict=False)
                parser.read_string(text)
                sections = [name for name in ("pytest", "tool:pytest") if parser.has_section(name)]
                return {name: dict(parser[name]) for name in sections}
    except (ValueError, AttributeError, configparser.Error, RecursionError):
        return content


async def undo(sandbox: Sandbox, findings: Sequence[Finding], before: Inventory, *, timeout: float) -> None:
    """Put back what was changed or removed, and remove what was added."""
    paths = b"".join(os.fsencode(f"./{finding.path}") + b"\0" for finding in findings)
    if paths:
        result = await run_script(
            sandbox, "xargs -0 rm -rf --", timeout=timeout, name="evaluator-undo", stdin=paths
        )
        if result.exit_code != 0:
            raise Spoiled("what the agent added for test runners cannot be removed")
    for finding in findings:
        content = before.get(finding.path)
        if content is not None:
            await place_file(sandbox, sandbox.workspace / finding.path, content)


async def inventory_before(context: EvaluationContext, protect: Sequence[str], after: Inventory) -> Inventory:
    """The workspace's inventory as the agent found it.

    That is the task's files where nothing else can have been there and nothing speaks against it. Else a
    fresh sandbox is made to see: of an image's files, or of what preparation made, all may be removed.
    """
    task = context.task
    from_task = inventory_of_task(task, protect)
    if not (task.prepare or "image" in task.runtime.options or compare(from_task, after)):
        return from_task
    try:
        async with context.fresh_sandbox() as fresh:
            return await take_inventory(fresh, protect, timeout=context.seconds_left)
    except SandboxError as error:
        raise EvaluationFailed(f"no fresh sandbox could be made: {error}") from error
