"""What an agent that repairs a small package does, turn by turn: the script of one session.

No two samples of a task go about it alike: which files are looked at, in which order, in which words, how
often the tests are run, and whether the repair is made at all are drawn at random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TESTS = "python3 -m unittest discover -t . -s tests"
LOOKS = (
    "Let me look at {what} first.",
    "I want to see {what} before I change anything.",
    "Next, {what}.",
    "I should read {what} carefully, since the issue mentions this behaviour.",
    "Checking {what}.",
    "To understand how it fits together I need {what}.",
)
RUNS = (
    "Running the tests to see where things stand.",
    "Let me run the test suite.",
    "Do the tests still pass?",
    "I run all tests again to be sure that nothing else has changed.",
)
FIXES = (
    "The cause is clear now. I rewrite {file} with the repair.",
    "I have found it: the code in {file} does not do what the issue expects. Here is the new version.",
    "Changing {file} now, and keeping everything else as it is.",
)
PROBES = (
    "I want to see the behaviour myself, with a small script.",
    "Let me try it out from Python.",
    "Before going on I check my understanding of `{name}`.",
)
ENDINGS = (
    "I repaired the issue in {file}; all tests pass and I checked the case that was reported.",
    "Done. The change is in {file} only, and the existing tests still pass.",
)
FAILURES = (
    "I could not find a change that is certainly right, so I left {file} as it was.",
    "The tests pass as they are; I made no change to {file}.",
)


@dataclass(frozen=True, slots=True)
class Repair:
    """One of the tasks, with its solution."""

    package: str
    files: tuple[str, ...]
    """Python files of the package and of its tests."""
    fixed: dict[str, str]
    """Path → text with the repair."""


def read_repair(directory: Path) -> Repair:
    """From a Harbor task directory of examples/swe-mini."""
    repository, solution = directory / "environment" / "repo", directory / "solution" / "fixed"
    files = sorted(path.relative_to(repository).as_posix() for path in repository.rglob("*.py"))
    fixed = {path.relative_to(solution).as_posix(): path.read_text() for path in solution.rglob("*.py")}
    package = next(iter(fixed)).split("/")[0]
    return Repair(package, tuple(file for file in files if (repository / file).stat().st_size), fixed)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model: what it says, and the command it runs, unless it is the last."""

    text: str
    command: str | None = None


def turns(repair: Repair, seed: str, fewest: int, most: int) -> Iterator[Turn]:
    """One session's turns, between `fewest` and `most` of them, the last without a command."""
    draw = random.Random(seed)
    count = draw.randint(fewest, most) - 1
    file = next(iter(repair.fixed))
    is_solved = draw.random() < 0.5
    fix_at = draw.randint(count // 2, count - 4)
    for number in range(count):
        if number == fix_at and is_solved:
            yield Turn(draw.choice(FIXES).format(file=file), _writing(file, repair.fixed[file]))
        elif number == 0 or draw.random() < 0.55:
            yield _looking(repair, draw)
        elif draw.random() < 0.5:
            yield Turn(draw.choice(RUNS), draw.choice((TESTS, TESTS + " 2>&1 | tail -5", TESTS + " -v")))
        else:
            yield _probing(repair, draw)
    yield Turn(draw.choice(ENDINGS if is_solved else FAILURES).format(file=file))


def written(turn: Turn, tool: str, extra: dict[str, object]) -> str:
    """The answer as the model would write it, with the call in its tags."""
    if turn.command is None:
        return turn.text
    call = json.dumps({"name": tool, "arguments": {"command": turn.command, **extra}})
    return f"{turn.text}\n<tool_call>\n{call}\n</tool_call>"


def _looking(repair: Repair, draw: random.Random) -> Turn:
    file = draw.choice(repair.files)
    first = draw.choice((1, 1, 10, 20))
    what, command = draw.choice(
        (
            ("the files there are", "ls -la . " + repair.package),
            ("the files there are", "find . -name '*.py' | sort | xargs wc -l"),
            (f"`{file}`", f"cat {file}"),
            (f"`{file}`", f"sed -n '{first},{first + 15}p' {file}"),
            (f"the functions of {repair.package}", f"grep -n 'def \\|class ' -r {repair.package}"),
            ("what the tests cover", "grep -n 'def test' -r tests"),
            ("the notes on how it is meant to work", f"head -{draw.choice((5, 10, 15))} README.md"),
            (f"the imports of `{file}`", f"grep -n 'import' {file}"),
        )
    )
    return Turn(draw.choice(LOOKS).format(what=what), command)


def _probing(repair: Repair, draw: random.Random) -> Turn:
    name = repair.package
    body = draw.choice(
        (
            f"import {name}\nprint([n for n in dir({name}) if not n.startswith('_')])",
            f"import {name}, inspect\nprint(inspect.getsource({name})[:400])",
            f"import {name}\nfor n, value in vars({name}).items():\n    if callable(value):\n"
            f"        print(n, (value.__doc__ or '').strip().splitlines()[:1])",
            f"import unittest\nfound = unittest.defaultTestLoader.discover('tests', top_level_dir='.')\n"
            f"print(found.countTestCases(), 'tests of', '{name}')",
        )
    )
    return Turn(draw.choice(PROBES).format(name=name), f"python3 - <<'END'\n{body}\nEND")


def _writing(file: str, text: str) -> str:
    return f"cat > {file} <<'END'\n{text.rstrip()}\nEND"
