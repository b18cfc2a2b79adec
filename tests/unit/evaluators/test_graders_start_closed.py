"""Nothing that an agent leaves is loaded by the programs that grade it, whichever evaluator runs them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polar.evaluators.attacks import ATTACKS
from polar.evaluators.base import EvaluationContext
from tests.evaluations import agent_does, evaluate, evaluation, make_task

FILES = {
    "calc/__init__.py": "def double(x):\n    return x + 2\n",
    "tests/test_calc.py": "def test_it():\n    pass\n",
}
HIDDEN = "from calc import double\n\n\ndef test_three():\n    assert double(3) == 6\n"
FIX = "printf 'def double(x):\\n    return 2 * x\\n' > calc/__init__.py"
PLAN: dict[str, Any] = {
    "command": f"{sys.executable} -m pytest -rA -p no:cacheprovider tests",
    "format": "pytest",
    "files": {"tests/test_calc.py": {"text": HIDDEN}},
}
CHECK: dict[str, Any] = {
    "command": "python3 check.py",
    "files": {"check.py": {"text": "from calc import double\nassert double(3) == 6\n"}},
}
WAYS = [
    ("tests", {**PLAN, "sandbox": "live"}),
    ("tests", {**PLAN, "sandbox": "fresh"}),
    ("diff", PLAN),
    ("command", {**CHECK, "sandbox": "live"}),
    ("command", CHECK),
]
every_way = pytest.mark.parametrize(
    ("name", "options"), WAYS, ids=["tests-live", "tests", "diff", "command-live", "command"]
)
BY_NAME = {attack.name: attack for attack in ATTACKS}


@pytest.fixture
async def context(tmp_path: Path) -> AsyncIterator[EvaluationContext]:
    async with evaluation(make_task(FILES, runtime="process"), tmp_path) as made:
        yield made


@every_way
async def test_honest_work_is_worth_one(
    context: EvaluationContext, name: str, options: dict[str, Any]
) -> None:
    assert (await evaluate(context, name, **options)).reward == 0.0
    await agent_does(context, FIX)
    assert (await evaluate(context, name, **options)).reward == 1.0


@every_way
@pytest.mark.parametrize(
    "attack",
    [
        "plug-in-by-metadata",
        "plug-in-by-linked-metadata",
        "usercustomize-in-home",
        "standard-library-module",
    ],
)
async def test_what_the_agent_planted_has_no_say(
    context: EvaluationContext, name: str, options: dict[str, Any], attack: str
) -> None:
    await agent_does(context, BY_NAME[attack].command)
    assert (await evaluate(context, name, **options)).reward == 0.0
