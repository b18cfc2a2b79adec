"""A skip is no pass: in CI only what a machine cannot have excuses one, and a run says what it left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CONFTEST = """from tests import skips
def pytest_sessionfinish(session):
    skips.{rule}(session)
def pytest_terminal_summary(terminalreporter):
    skips.tell_excused_skips(terminalreporter)
"""
SKIPPED = "import pytest\ndef test_a(): pytest.skip({reason!r})\ndef test_b(): pytest.skip({reason!r})\n"
PASSED = "def test_c(): pass\n"
ENGINE = "conformance of docker is NOT TESTED here: no engine"
HARDWARE = "NOT TESTED: the numbers are those of x86_64"
OTHER = "there is no browser"


def run(
    directory: Path, rule: str, tests: str, *, ci: bool = False, workers: int = 0
) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text(CONFTEST.format(rule=rule))
    (directory / "test_it.py").write_text(tests)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment |= {"CI": "true"} if ci else {}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", str(workers), str(directory)]
    return subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("reason", "ci", "code"),
    [(OTHER, True, 1), (OTHER, False, 0), (HARDWARE, True, 0), (ENGINE, True, 0)],
)
def test_in_ci_only_what_a_machine_cannot_have_excuses_a_skip(
    tmp_path: Path, reason: str, ci: bool, code: int
) -> None:
    done = run(tmp_path, "fail_unwanted_skips", SKIPPED.format(reason=reason) + PASSED, ci=ci)
    assert done.returncode == code, done.stdout
    error = (
        "error: skipped in CI, though not for want of a container engine, other hardware or another kernel"
    )
    assert done.stdout.count(f"{error}: {reason}") == code


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("reason", "wanting"), [(ENGINE, "a container engine"), (HARDWARE, "other hardware")]
)
def test_what_was_not_tested_is_said_once_at_the_end(
    tmp_path: Path, reason: str, wanting: str, workers: int
) -> None:
    done = run(tmp_path, "fail_unwanted_skips", SKIPPED.format(reason=reason) + PASSED, workers=workers)
    _, _, end = done.stdout.partition("not tested in this run")
    assert end.count(f"for want of {wanting}: {reason}") == 1, done.stdout


def test_skips_of_workers_count(tmp_path: Path) -> None:
    done = run(tmp_path, "fail_unwanted_skips", SKIPPED.format(reason=OTHER), ci=True, workers=2)
    assert done.returncode == 1, done.stdout


@pytest.mark.parametrize(("tests", "code"), [("", 1), (PASSED, 0)])
def test_a_suite_that_tested_nothing_has_failed(tmp_path: Path, tests: str, code: int) -> None:
    done = run(tmp_path, "fail_if_nothing_ran", SKIPPED.format(reason=OTHER) + tests)
    assert done.returncode == code, done.stdout
    assert done.stdout.count(f"error: this suite tested nothing: {OTHER}") == code
