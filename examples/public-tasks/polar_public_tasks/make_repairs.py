"""Breaks packages, and keeps the bugs that their own tests notice.

    python -m polar_public_tasks.make_repairs --seed 1 --out bugs.json

Tests run in a bubblewrap sandbox, as when sessions are graded. A bug is kept if the same tests fail with it,
and pass without it, for every hash seed, and if most tests still pass: a bug that breaks everything needs no
search.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from polar.errors import PolarError
from polar.evaluators.inside import run_grader
from polar.evaluators.test_reports import Outcome, ReportFormat, TestReport, parse_report
from polar.runtimes.base import Host, Sandbox, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar_public_tasks.bugs import Bug, possible_bugs
from polar_public_tasks.packages import PACKAGES, Package
from polar_public_tasks.repairs import (
    HASH_SEED,
    TriedBug,
    TriedBugs,
    TriedPackage,
    format_list,
    grading,
    grading_files,
    read_bugs,
)

TRIES = 8
"""Maximum number of attempts per wanted bug."""
SECONDS = 60.0
MOST_BROKEN = 1 / 3
REPORT_LINES = 40
HASH_SEEDS = (HASH_SEED, "2")


class Trials:
    """A package in a sandbox, whose tests are run repeatedly."""

    def __init__(self, package: Package, sandbox: Sandbox) -> None:
        self.package = package
        self.sandbox = sandbox
        self.command = grading(package, (), ())["command"]
        self.known: set[str] = set()

    async def put(self, path: str, data: bytes) -> None:
        await self.sandbox.upload(self.sandbox.workspace / PurePosixPath(path), data)

    async def run(self, hash_seed: str) -> tuple[TestReport, str]:
        env = {"PYTHONHASHSEED": hash_seed}
        result = await run_grader(self.command, self.sandbox, env=env, timeout=SECONDS)
        text = "" if result.timed_out else result.stdout.text()
        return parse_report(ReportFormat.PYTEST, text), text

    async def sound_tests(self) -> tuple[str, ...]:
        """Return the tests that pass every time; `known` are all tests."""
        passed: list[set[str]] = []
        for seed in HASH_SEEDS:
            report, _ = await self.run(seed)
            self.known |= report.outcomes.keys()
            passed.append({name for name, how in report.outcomes.items() if how is Outcome.PASSED})
        return tuple(sorted(set.intersection(*passed)))

    async def try_bug(self, file: str, source: str, bug: Bug, tests: tuple[str, ...]) -> TriedBug | None:
        """Return the bug with the tests it breaks; None if it is not kept."""
        await self.put(file, bug.applied_to(source).encode())
        try:
            broken: list[list[str]] = []
            for seed in HASH_SEEDS:
                report, text = await self.run(seed)
                # If a test file does not load, its tests are missing and its name appears instead.
                if not set(tests) <= report.outcomes.keys() <= self.known:
                    return None
                bad = [name for name in tests if report.outcomes[name].is_bad]
                if not 0 < len(bad) <= MOST_BROKEN * len(tests):
                    return None
                broken.append(bad)
        finally:
            await self.put(file, source.encode())
        failure = first_failure(text, broken[0])
        if broken[0] != broken[1] or failure is None:
            return None
        return TriedBug(file=file, breaks=tuple(broken[0]), report=failure, **asdict(bug))


def first_failure(text: str, tests: list[str]) -> str | None:
    """Describe the first of these tests that fails, without the package's own code."""
    titles = {test.partition("::")[2].replace("::", ".") for test in tests}
    _, _, failures = text.partition(" FAILURES ===")
    parts = iter(_TITLE.split(failures)[1:])
    found = next((part for title, part in zip(parts, parts, strict=False) if title in titles), None)
    if found is None:
        return None
    frames = _BETWEEN_FRAMES.split(found)
    lines = frames[0].split("\n")
    said = [line[1:] for line in frames[-1].split("\n") if line.startswith("E ")]
    last = next((number for number, line in enumerate(lines) if line.startswith(">")), None)
    if last is None or not said:
        return None
    first = next((number for number, line in enumerate(lines) if line.startswith("    ")), last)
    # A statement of several lines continues below the mark.
    while last + 1 < len(lines) and lines[last + 1].startswith("    "):
        last += 1
    shown = _plain([" " + line[1:] for line in lines[first : last + 1]])
    if given := [line for line in (_SELF.sub("", line) for line in lines[:first]) if line]:
        shown = [*_plain(given), "", *shown]
    return "\n".join(
        f"    {line}".rstrip() for line in [*shown[-REPORT_LINES:], "", *_plain(said)[:REPORT_LINES]]
    )


_TITLE = re.compile(r"^(?:_{3,} (\S.*) _{3,}|={3,} .* ={3,})$", re.MULTILINE)
_SELF = re.compile(r"^self = <[^>]*>(?:, )?")
_BETWEEN_FRAMES = re.compile(r"^(?:_ )+$", re.MULTILINE)


def _plain(lines: list[str]) -> list[str]:
    """Dedent the lines, and remove what differs between processes."""
    text = textwrap.dedent("\n".join(lines)).strip("\n")
    return re.sub(r"0x[0-9a-f]{6,}|(?<=id=')[0-9]{6,}", "0x...", text).split("\n")


def in_turns(package: Package, seed: int) -> Iterator[tuple[str, Bug]]:
    """Yield the package's possible bugs, alternating between rules, each rule's in an order from the seed."""
    by_rule: dict[str, list[tuple[str, Bug]]] = defaultdict(list)
    for file, source in sorted(package.sources().items()):
        for bug in possible_bugs(source):
            by_rule[bug.rule].append((file, bug))
    for rule, bugs in by_rule.items():
        random.Random(f"{seed} {package.name} {rule}").shuffle(bugs)
    for turn in zip_longest(*(by_rule[rule] for rule in sorted(by_rule))):
        yield from (one for one in turn if one is not None)


async def broken_package(package: Package, seed: int, wanted: int, directory: Path) -> TriedPackage:
    """Find the wanted number of bugs of a package, no two in one function."""
    sandbox = await BubblewrapRuntime(BubblewrapRuntime.Options()).start(
        SandboxSpec(package.name, "127.0.0.1", 0), Host(directory)
    )
    trials = Trials(package, sandbox)
    try:
        for path, data in (package.workspace() | grading_files(package)).items():
            await trials.put(path, data)
        tests = await trials.sound_tests()
        sources = package.sources()
        kept: list[TriedBug] = []
        seen: set[tuple[str, str]] = set()
        for number, (file, bug) in enumerate(in_turns(package, seed)):
            if len(kept) == wanted or number == TRIES * wanted:
                break
            if (file, bug.function) in seen:
                continue
            if found := await trials.try_bug(file, sources[file], bug, tests):
                seen.add((file, bug.function))
                kept.append(found)
                print(f"{package.name} {len(kept)}/{wanted}: {bug.rule} in {bug.function}", file=sys.stderr)
    finally:
        await sandbox.stop()
    return TriedPackage(version=package.sdist.version, tests=tests, bugs=tuple(kept))


async def make(seed: int, wanted: int, jobs: int, out: Path) -> None:
    """Write the list, one package at a time, keeping packages that it already has."""
    seats = asyncio.Semaphore(jobs)
    made = dict(read_bugs(out).packages) if out.exists() else {}

    async def one(package: Package, directory: Path) -> None:
        async with seats:
            made[package.name] = await broken_package(package, seed, wanted, directory)
        listed = {name: made[name] for name in PACKAGES if name in made}
        out.write_text(format_list(TriedBugs(seed=seed, packages=listed)))

    with TemporaryDirectory(prefix="polar-repairs-") as scratch:
        missing = [package for package in PACKAGES.values() if package.name not in made]
        await asyncio.gather(*(one(package, Path(scratch)) for package in missing))


def main() -> None:
    parser = argparse.ArgumentParser(description="Break packages; keep the bugs that their own tests notice.")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other bugs")
    parser.add_argument("--of-each", type=int, default=6, help="bugs per package")
    parser.add_argument("--jobs", type=int, default=2, help="number of packages at a time")
    parser.add_argument("--out", type=Path, required=True, help="output file; packages in it are skipped")
    asked = parser.parse_args()
    try:
        asyncio.run(make(asked.seed, asked.of_each, asked.jobs, asked.out))
    except PolarError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
