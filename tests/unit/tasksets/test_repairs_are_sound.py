"""Bugs in real packages: what is listed is what the rules make, whole packages are held out."""

from __future__ import annotations

import ast
import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from polar_public_tasks.bugs import RULES, possible_bugs
from polar_public_tasks.make_repairs import first_failure, in_turns
from polar_public_tasks.packages import PACKAGES, Split
from polar_public_tasks.repairs import (
    LISTED,
    Repairs,
    TriedBugs,
    format_list,
    grading,
    grading_files,
    read_bugs,
)

from polar.errors import InvalidInput
from polar.evaluators.test_reports import ReportFormat, parse_report
from polar.evaluators.tests import Expected, TestReward, grade
from polar.tasksets.rows import BadRow, Row
from polar.tasksets.task_document import check_task

LIST = read_bugs(LISTED)
BUGS = [(name, bug) for name, tried in LIST.packages.items() for bug in tried.bugs]
PERMISSIVE = {"MIT", "BSD-3-Clause", "BSD-3-Clause OR Apache-2.0"}


def rows(split: str | None = None, **options: tuple[str, ...]) -> list[Row]:
    made = list(Repairs(Repairs.Options(**options)).rows(None, split))
    assert all(isinstance(row, Row) for row in made)
    return [row for row in made if isinstance(row, Row)]


def test_there_are_enough_packages_and_none_is_in_both_splits() -> None:
    train, held_out = ({row.columns["package"] for row in rows(split)} for split in Split)
    assert len(train) >= 8
    assert len(held_out) >= 3
    assert not train & held_out
    assert {package.licence for package in PACKAGES.values()} <= PERMISSIVE


def test_no_two_tasks_are_alike_and_every_rule_is_used() -> None:
    ids = [row.task["id"] for row in rows() if row.task]
    assert len(set(ids)) == len(ids) == len(BUGS)
    assert {bug.rule for _, bug in BUGS} == set(RULES)


def test_every_listed_bug_is_one_that_the_seed_comes_to() -> None:
    for name, tried in LIST.packages.items():
        made = [(file, bug) for file, bug in in_turns(PACKAGES[name], LIST.seed)]
        places = [made.index((bug.file, bug.edit)) for bug in tried.bugs]
        assert places == sorted(places)


def test_what_a_bug_breaks_are_tests_that_pass_without_it() -> None:
    for name, bug in BUGS:
        assert set(bug.breaks) < set(LIST.packages[name].tests)


def test_the_list_is_the_one_that_the_readme_names() -> None:
    assert LISTED.read_text() == format_list(LIST)
    readme = (Path(__file__).parents[3] / "examples" / "public-tasks" / "README.md").read_text()
    assert hashlib.sha256(LISTED.read_bytes()).hexdigest() in readme


@pytest.mark.parametrize("name", PACKAGES)
def test_the_agent_sees_neither_the_tests_nor_the_sound_code(name: str) -> None:
    for row in rows(packages=(name,)):
        task, solution, problems = check_task({**(row.task or {}), "harness": "pi"}, LISTED.parent)
        assert not problems
        assert task is not None
        assert solution is not None
        sound = solution.files["sound"].data
        assert PACKAGES[name].hidden()
        assert not PACKAGES[name].hidden().keys() & task.files.keys()
        assert sound not in [file.data for file in task.files.values()]
        broken = task.files[row.columns["file"]].data
        assert sum(a != b for a, b in zip(sound.split(b"\n"), broken.split(b"\n"), strict=True)) == 1
        edit = row.columns["solutions"][0][-1]["arguments"]["edits"][0]
        assert broken.decode().count(edit["oldText"]) == 1
        assert broken.decode().replace(edit["oldText"], edit["newText"]).encode() == sound


def test_the_report_says_what_fails_and_not_where() -> None:
    for name, bug in BUGS:
        assert bug.report.strip()
        modules = {path.rpartition("/")[2] for path in PACKAGES[name].sources()} - {"__init__.py"}
        assert not [module for module in modules if f"{module}:" in bug.report]


SOURCE = """
class Shelf:
    def place(self, book, row=0):
        if book is None or not self.rows:
            return False
        self.rows[row + 1].append(book)
        return len(self.rows[0]) <= max(row, 3)
"""


def test_each_rule_changes_one_place_and_leaves_a_program() -> None:
    made = possible_bugs(SOURCE)
    assert len(Counter(bug.rule for bug in made)) >= 6
    for bug in made:
        changed = bug.applied_to(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert bug.function == "Shelf.place"


@given(st.integers(0, 2**32))
def test_the_same_source_has_the_same_bugs(seed: int) -> None:
    numbers = random.Random(seed)
    body = " + ".join(f"a[{numbers.randrange(9)}]" for _ in range(numbers.randrange(1, 5)))
    source = f"def f(a):\n    return {body}\n"
    assert possible_bugs(source) == possible_bugs(source)
    assert all(ast.parse(bug.applied_to(source)) for bug in possible_bugs(source))


def test_a_failure_is_told_without_the_packages_own_code() -> None:
    printed = """..F
=================================== FAILURES ===================================
_______________________________ Always.test_fails ______________________________

>       assert False
E       assert False

__________________________________ test_add ____________________________________

self = <Tests at 0x7f0011223344>, b = 2

    def test_add(b):
>       assert add(1,
                   2) == 3

tests/test_add.py:3:
_ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ _ \n
    def add(a, b):
>       return secret
E       NameError: name 'secret' is not defined at 0x7f0011223344

package.py:9: NameError
=========================== short test summary info ============================
"""
    told = first_failure(printed, ["tests/test_add.py::test_add"])
    assert told is not None
    assert "assert add(1,\n                   2) == 3" in told
    assert "NameError: name 'secret' is not defined at 0x..." in told
    assert "def add(a, b)" not in told
    assert told.startswith("    b = 2\n\n    def test_add(b):")


def graded(name: str, work: dict[str, bytes], directory: Path) -> float:
    """The reward of the sound package with this work over it."""
    package = PACKAGES[name]
    for path, data in (package.workspace() | work | grading_files(package)).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    options = grading(package, LIST.packages[name].tests, ())
    command = [sys.executable, *options["command"][1:]]
    environment = {**os.environ, **options["env"]}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, check=False)
    report = parse_report(ReportFormat.PYTEST, done.stdout.decode())
    return grade(report, done.returncode, Expected(**options["expected"]), TestReward.ALL_PASS).reward


def test_a_test_of_the_agents_that_does_not_load_is_no_harm(tmp_path: Path) -> None:
    assert graded("parse", {"tests/test_mine.py": b"import a_module_that_is_not_there\n"}, tmp_path) == 1.0


def test_code_cannot_call_what_fails_a_known_failure(tmp_path: Path) -> None:
    sound = PACKAGES["parse"].workspace()["parse.py"]
    lie = b"\n\ndef with_pattern(*_, **__):\n    __import__('pytest').xfail()\n"
    assert graded("parse", {"parse.py": sound + lie}, tmp_path) == 0.0


def test_what_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="must be one of train, held_out"):
        rows("test")
    with pytest.raises(InvalidInput, match="the list has no bugs of left-pad"):
        rows(packages=("left-pad",))


def test_a_bug_of_another_release_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    old = LIST.packages["parse"].model_copy(update={"version": "0.1"})
    place = tmp_path / "bugs.json"
    place.write_text(format_list(TriedBugs(seed=0, packages={**LIST.packages, "parse": old})))
    made = list(Repairs(Repairs.Options()).rows(place, "train"))
    bad = [row for row in made if isinstance(row, BadRow)]
    assert len(bad) == len(old.bugs)
    assert "tried with parse 0.1" in bad[0].problem
    assert len(made) > len(bad)
