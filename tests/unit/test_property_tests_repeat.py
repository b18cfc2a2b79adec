"""Property-based tests give the same result every time, unless they are asked to search."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import __file__ as conftest

PROPERTY = """
from hypothesis import given, strategies as st

drawn = []

@given(st.integers())
def test_some_numbers(number):
    drawn.append(number)

def test_tell():
    print("drawn", hash(tuple(drawn)), "of", len(drawn))
"""


def run(directory: Path, *options: str) -> str:
    """What the property-based test drew, as a process of its own sees it."""
    test = directory / "test_property.py"
    test.write_text(PROPERTY)
    command = [sys.executable, "-m", "pytest", "-sq", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    root = Path(conftest).parent.parent
    result = subprocess.run([*command, *options, str(test)], cwd=root, capture_output=True, text=True)
    found = re.search(r"drawn -?\d+ of \d+", result.stdout)
    assert found, result.stdout
    return found[0]


def test_two_runs_draw_the_same_examples(tmp_path: Path) -> None:
    assert run(tmp_path) == run(tmp_path)


def test_a_search_draws_by_its_seed(tmp_path: Path) -> None:
    search = [run(tmp_path, "--hypothesis-profile=random", f"--hypothesis-seed={seed}") for seed in (1, 1, 2)]
    assert search[0] == search[1] != search[2]
