"""A small project whose function `double` is wrong, and the ways to score its repair."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polar.evaluators.base import EvaluationContext
from tests.evaluations import evaluation, make_task

FILES = {
    "calc/__init__.py": "def double(x):\n    return x + 2\n",
    "tests/__init__.py": "",
    "tests/test_calc.py": (
        "import unittest\nfrom calc import double\n\n\n"
        "class CalcTest(unittest.TestCase):\n"
        "    def test_two(self):\n        self.assertEqual(double(2), 4)\n"
    ),
    "pyproject.toml": "[project]\nname = 'calc'\n",
    ".gitignore": "*.log\n",
}
HIDDEN = FILES["tests/test_calc.py"] + "\n    def test_three(self):\n        self.assertEqual(double(3), 6)\n"
FIX = "printf 'def double(x):\\n    return 2 * x\\n' > calc/__init__.py"


@pytest.fixture
def plan() -> dict[str, Any]:
    """The options that `tests` and `diff` share."""
    return {
        "command": "python3 -m unittest -v tests.test_calc",
        "format": "unittest",
        "files": {"tests/test_calc.py": {"text": HIDDEN}},
        "expected": {
            "fail_to_pass": ["tests.test_calc.CalcTest.test_three"],
            "pass_to_pass": ["tests.test_calc.CalcTest.test_two"],
        },
    }


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[EvaluationContext]:
    async with evaluation(make_task(FILES, runtime="process"), tmp_path) as made:
        yield made
