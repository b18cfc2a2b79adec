"""Bugs in real packages to repair, as a source of rows; `repairs.json` lists the verified ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from polar.errors import InvalidInput, explain
from polar.models.component import Frozen
from polar.tasksets.rows import BadRow, Row, RowSource
from polar_public_tasks.bugs import Bug
from polar_public_tasks.packages import PACKAGES, Package, Split, content, pytest_archive

HERE = Path(__file__).parent
LISTED = HERE / "repairs.json"
HIDDEN = ".polar-grading"
_RUNNER = (HERE / "graders" / "run_tests.py").read_bytes()
HASH_SEED = "1"
"""Some test names depend on the order of hashes, so it is fixed."""
_SETTINGS = b"[pytest]\npython_files = test_*.py tests.py\n"


class TriedBug(Frozen):
    """A bug that breaks tests, and its symptom."""

    file: str
    rule: str
    function: str
    start: int
    end: int
    new: str
    breaks: tuple[str, ...] = Field(min_length=1)
    """The tests that pass without it and always fail with it."""
    report: str
    """What the first of them does, and how it fails."""

    @property
    def edit(self) -> Bug:
        return Bug(self.rule, self.function, self.start, self.end, self.new)


class TriedPackage(Frozen):
    version: str
    tests: tuple[str, ...]
    """The tests that always pass without a bug."""
    bugs: tuple[TriedBug, ...]


class TriedBugs(Frozen):
    """The content of repairs.json, which `python -m polar_public_tasks.make_repairs` writes."""

    seed: int
    packages: dict[str, TriedPackage]


class Repairs(RowSource):
    """`split: train`, `split: held_out` (whole packages), or all; `source` may be another list of bugs.

    A row's columns have the bug, the task's `instruction`, and `solutions`, each a list of Pi's tool calls.
    Only the instruction is part of the task.
    """

    class Options(BaseModel):
        model_config = {"extra": "forbid", "frozen": True}

        packages: tuple[str, ...] = ()
        """Packages to use; all if empty."""

    options: Options

    def rows(self, place: Path | None, split: str | None) -> Iterator[Row | BadRow]:
        if split is not None and split not in set(Split):
            raise InvalidInput(f"split: {split} must be one of {', '.join(Split)}")
        listed = read_bugs(place or LISTED)
        wanted = self.options.packages or tuple(listed.packages)
        if unknown := [name for name in wanted if name not in listed.packages or name not in PACKAGES]:
            raise InvalidInput(f"options.packages: the list has no bugs of {', '.join(unknown)}")
        chosen = {name: listed.packages[name] for name in wanted if split in (None, PACKAGES[name].split)}
        # Packages alternate, so that the first tasks include every one.
        for number in range(max((len(tried.bugs) for tried in chosen.values()), default=0)):
            for name, tried in chosen.items():
                if number < len(tried.bugs):
                    yield _row(PACKAGES[name], tried, tried.bugs[number])


def read_bugs(place: Path) -> TriedBugs:
    try:
        return TriedBugs.model_validate_json(place.read_bytes())
    except OSError as error:
        raise InvalidInput(f"source: {place} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise InvalidInput(f"source: {place} is not a list of bugs: {explain(error)}") from None


def _row(package: Package, tried: TriedPackage, bug: TriedBug) -> Row | BadRow:
    where = f"{package.name}: {bug.function}: {bug.rule}"
    if tried.version != package.sdist.version:
        return BadRow(where, f"it was tried with {package.name} {tried.version}, not {package.sdist.version}")
    files = package.workspace()
    sound = files[bug.file].decode()
    broken = bug.edit.applied_to(sound)
    marks = f"{package.sdist} {bug.file} {bug.start} {bug.end} {bug.new}"
    about = {
        "package": str(package.sdist),
        "licence": package.licence,
        "rule": bug.rule,
        "split": package.split.value,
    }
    task = {
        "id": f"{package.name}-{hashlib.sha256(marks.encode()).hexdigest()[:8]}",
        "instruction": _instruction(package, bug),
        "files": {path: content(data) for path, data in (files | {bug.file: broken.encode()}).items()},
        "evaluator": {"name": "tests", "options": grading(package, tried.tests, bug.breaks)},
        "metadata": about,
        "solution": {
            "script": f'cp "$POLAR_SOLUTION/sound" {bug.file}',
            "files": {"sound": {"text": sound}},
        },
    }
    columns = {"file": bug.file, "function": bug.function, "instruction": task["instruction"]}
    return Row(where, {**about, **columns, "solutions": [_calls(bug, sound, broken)]}, task)


def _calls(bug: TriedBug, sound: str, broken: str) -> list[dict[str, Any]]:
    """Return the calls of an agent that knows the function: look at it, then edit the lines around the
    bug."""
    name = bug.function.rpartition(".")[2]
    look = f"grep -n -A 40 'def {name}(' {bug.file}"
    before, after = broken.split("\n"), sound.split("\n")
    last = sound.encode()[: bug.start].decode().count("\n")
    first = last
    while broken.count("\n".join(before[first : last + 1])) > 1:
        first -= 1
    old, new = ("\n".join(lines[first : last + 1]) for lines in (before, after))
    edit = {"path": bug.file, "edits": [{"oldText": old, "newText": new}]}
    return [{"tool": "bash", "arguments": {"command": look}}, {"tool": "edit", "arguments": edit}]


def _instruction(package: Package, bug: TriedBug) -> str:
    return (
        f"This copy of {package.name} {package.sdist.version} has a bug: what follows works in the release "
        f"and fails here.\n\n{bug.report}\n\nFind the bug in {package.code} and fix it there. "
        "The package's tests are not in this directory; all of them must pass afterwards."
    )


def grading(package: Package, tests: tuple[str, ...], breaks: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of the evaluator `tests`: the package's own, added after the agent has ended."""
    kept = [test for test in tests if test not in set(breaks)]
    return {
        "command": ["python3", f"{HIDDEN}/run_tests.py", package.root, *package.tests],
        "format": "pytest",
        "env": {"PYTHONHASHSEED": HASH_SEED},
        "files": {path: content(data) for path, data in grading_files(package).items()},
        "expected": {"fail_to_pass": list(breaks), "pass_to_pass": kept},
    }


def grading_files(package: Package) -> dict[str, bytes]:
    """Return the test runner and the tests."""
    runner = {"run_tests.py": _RUNNER, "pytest.ini": _SETTINGS, "pytest.zip": pytest_archive()}
    return {f"{HIDDEN}/{name}": data for name, data in runner.items()} | package.hidden()


def format_list(listed: TriedBugs) -> str:
    """Format the list with one line per bug, so that changes are readable."""
    packages = []
    for name, tried in listed.packages.items():
        bugs = ",\n".join(json.dumps(bug.model_dump(mode="json")) for bug in tried.bugs)
        version, tests = json.dumps(tried.version), json.dumps(tried.tests)
        packages.append(
            f'{json.dumps(name)}: {{"version": {version},\n"tests": {tests},\n"bugs": [\n{bugs}]}}'
        )
    return f'{{"seed": {listed.seed}, "packages": {{\n' + ",\n".join(packages) + "}}\n"
