"""What an agent left in a workspace to make a runner lie: found, undone and reported.

Tests import the code under test, so a program that is bent on it can always lie to its runner. What
can be kept out is everything that changes the runner from outside that code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.inside import (
    UNLOCK,
    UngradableWorkspace,
    must_run,
    place_file,
    private_directory,
    run_script,
)
from polar.evaluators.steering import (
    INSTALLED,
    essence,
    find_expression,
    is_guarded,
    is_makefile,
    is_named_by,
    is_settings,
    matches,
    shadows,
)
from polar.models.task import TaskSpec
from polar.runtimes.base import PathRefused, Sandbox, SandboxError

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


class Tampered(UngradableWorkspace):
    """The agent left what steers its grading, and the task says that this is worth nothing."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__("the agent tampered with what decides about its reward")
        self.findings = tuple(findings)


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
_PRUNED = " -o ".join(f"-name {name}" for name in INSTALLED)
_LIST = rf"""
{UNLOCK}
find . -mindepth 1 -maxdepth 1 -print0
printf '\0'
find . -path './.git/hooks/*' ! -name '*.sample' -print0
find . -path ./.git -prune -o -name node_modules -prune -print0
find . -path ./.git -prune -o -type d \( {_PRUNED} \) -prune -o ! -type d \( "$@" \) -print0
printf '{END}'
"""


async def take_inventory(sandbox: Sandbox, protect: Sequence[str], *, timeout: float) -> Inventory:
    """Every path of the workspace that guards look at."""
    expression = find_expression(protect)
    result = await must_run(sandbox, _LIST, *expression, timeout=timeout, name="evaluator-inventory")
    listing = result.stdout.read().decode(errors="surrogateescape")
    if not listing.endswith(f"\0{END}"):
        raise UngradableWorkspace("the agent left more files than can be looked at")
    top, _, rest = f"\0{listing.removesuffix(END)}".partition("\0\0")
    found: dict[str, bytes | None] = {name: None for name in _paths(top) if shadows(name)}
    paths = _paths(rest)
    if len(paths) > MAX_FILES:
        raise UngradableWorkspace(f"more than {MAX_FILES} files that guards must look at")
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


def inventory_of_task(task: TaskSpec, protect: Sequence[str]) -> Inventory:
    """The inventory of a workspace that holds the task's files and nothing else."""
    found: dict[str, bytes | None] = {}
    for path, file in task.files.items():
        pure = PurePosixPath(path)
        if shadows(pure.parts[0]):
            found[pure.parts[0]] = None
        if "node_modules" in pure.parts:
            found[str(pure)[: str(pure).index("node_modules") + len("node_modules")]] = None
        elif not set(INSTALLED) & set(pure.parts[:-1]) and (is_guarded(str(pure)) or matches(path, protect)):
            found[str(pure)] = file.data
    return found


def compare(before: Inventory, after: Inventory, allow: Sequence[str] = ()) -> tuple[Finding, ...]:
    """What is different and was not allowed by name, in the order of the paths."""
    changes = ((path, _change(path, before, after)) for path in sorted(before.keys() | after.keys()))
    return tuple(Finding(path, change) for path, change in changes if change and not is_named_by(path, allow))


def _change(path: str, before: Inventory, after: Inventory) -> Change | None:
    if path not in before:
        return None if _is_harmless(path, before, after[path]) else Change.ADDED
    if path not in after:
        return None if shadows(path) else Change.REMOVED
    return Change.CHANGED if essence(path, before[path]) != essence(path, after[path]) else None


def _is_harmless(path: str, before: Inventory, content: bytes | None) -> bool:
    """A file that tells a runner nothing, or the rules of a task that has none of its own."""
    if is_makefile(path):
        return not any(map(is_makefile, before))
    return is_settings(path) and essence(path, content) == essence(path, b"")


async def settle(
    sandbox: Sandbox,
    policy: TamperPolicy,
    before: Inventory,
    after: Inventory,
    *,
    allow: Sequence[str] = (),
    timeout: float,
) -> tuple[Finding, ...]:
    """What the agent tampered with, and do with it as the policy says; Tampered if that is worth nothing."""
    findings = compare(before, after, allow)
    if findings and policy is TamperPolicy.ZERO:
        raise Tampered(findings)
    await _undo(sandbox, findings if policy is TamperPolicy.NEUTRALISE else (), before, timeout=timeout)
    return findings


_UNDO = """
xargs -0 rm -rf -- || exit 1
find . -path ./.git -prune -o -name node_modules -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
: > "$1" && find . -path ./.git -prune -o -newer "$1" -exec touch -c -h -t 197001020000 {} + 2>/dev/null
rm -f "$1"
"""
"""Compiled files need not be of the sources beside them; what is from the future passes for newly built."""


async def _undo(sandbox: Sandbox, findings: Sequence[Finding], before: Inventory, *, timeout: float) -> None:
    """Put back what was changed or removed, and remove what was added."""
    paths = b"".join(os.fsencode(f"./{finding.path}") + b"\0" for finding in findings)
    now = str(private_directory(sandbox))
    result = await run_script(sandbox, _UNDO, now, timeout=timeout, name="evaluator-undo", stdin=paths)
    if result.exit_code != 0:
        raise UngradableWorkspace("what the agent added for test runners cannot be removed")
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
