"""Every task of examples/swe-mini in the default sandbox: only the gold patch is worth something."""

from __future__ import annotations

import asyncio
import filecmp
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from polar.evaluators.harbor_task import read_harbor_task
from polar.evaluators.swebench import SweRow
from polar.models.task import TaskSpec
from tests.evaluations import agent_does, evaluate, evaluation

pytestmark = pytest.mark.sandbox

SWE_MINI = Path(__file__).parents[2] / "examples" / "swe-mini"
ROWS = [json.loads(line) for line in (SWE_MINI / "swe-mini.jsonl").read_text().splitlines()]

DELETE_TESTS = "rm -rf tests"
EDIT_TESTS = """
for file in tests/test_*.py; do
    sed -i 's/self.assert[A-Za-z]*(/print(/; s/with print(.*/if True:/' "$file"
    printf '\\n\\nimport unittest\\n\\nunittest.TestCase.run = lambda self, result=None: None\\n' >> "$file"
done
"""
REPLACE_UNITTEST = """
cat > unittest.py <<'END'
import sys
print("tests.test_x.X.test_y (tests.test_x.X.test_y) ... ok", file=sys.stderr)
print("Ran 9 tests in 0.001s\\n\\nOK", file=sys.stderr)
sys.exit(0)
END
"""
EVALUATORS = ("swebench", "diff", "tests", "harbor")
ATTACKS = {"delete": DELETE_TESTS, "edit": EDIT_TESTS, "replace": REPLACE_UNITTEST}


def task_of(row: dict[str, Any]) -> TaskSpec:
    """One task for all evaluators: Harbor's places are there, the workspace is /app."""
    harbor = read_harbor_task(SWE_MINI / "harbor" / row["instance_id"])
    return TaskSpec.model_validate({"id": row["instance_id"], "harness": "shell", **harbor.fields()})


def evaluators_of(row: dict[str, Any], task: TaskSpec, place: str) -> dict[str, dict[str, Any]]:
    swe = SweRow.model_validate(row)
    tests: Any = task.evaluator.options["tests"]
    plan = {
        "command": row["test_cmd"],
        "format": "unittest",
        "files": {path.removeprefix("repo/"): file for path, file in tests.items() if "repo/" in path},
        "protect": ["tests/*"],
        "expected": swe.expected.model_dump(mode="json"),
    }
    return {
        "swebench": {"row": row},
        "diff": plan,
        "tests": {**plan, "sandbox": place},
        "harbor": {**task.evaluator.options, "sandbox": place},
    }


async def rewards(
    number: int, directory: Path, script: str, names: tuple[str, ...] = EVALUATORS
) -> dict[str, float]:
    """What each evaluator gives an agent that runs a script; every other task in a fresh sandbox."""
    row = ROWS[number]
    task = task_of(row)
    options = evaluators_of(row, task, "fresh" if number % 2 else "live")
    async with evaluation(task, directory) as context:
        await context.sandbox.upload(PurePosixPath("/tmp/gold.patch"), row["patch"].encode())
        await agent_does(context, script)
        # In this order: those that work in the agent's own sandbox change it.
        return {
            name: (await evaluate(context, name, **options[name])).reward
            for name in EVALUATORS
            if name in names
        }


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row["instance_id"] for row in ROWS])
async def test_gold_is_worth_one_and_nothing_is_worth_zero(number: int, tmp_path: Path) -> None:
    gold, empty = await asyncio.gather(
        rewards(number, tmp_path / "gold", "git apply /tmp/gold.patch"),
        rewards(number, tmp_path / "empty", "true"),
    )
    assert gold == dict.fromkeys(EVALUATORS, 1.0)
    assert empty == dict.fromkeys(EVALUATORS, 0.0)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row["instance_id"] for row in ROWS])
async def test_tampering_with_tests_is_worth_nothing(number: int, tmp_path: Path) -> None:
    """Tests deleted and edited on each task, by one evaluator; over all, each attack meets each evaluator."""
    attacks = [*ATTACKS.items()][: 3 if number < len(EVALUATORS) else 2]
    found = await asyncio.gather(
        *(
            rewards(number, tmp_path / name, script, (EVALUATORS[(number + shift) % len(EVALUATORS)],))
            for shift, (name, script) in enumerate(attacks)
        )
    )
    assert [list(scores.values()) for scores in found] == [[0.0]] * len(attacks)


async def test_a_fix_is_worth_one_whatever_else_the_agent_did_to_the_tests(tmp_path: Path) -> None:
    found = await rewards(0, tmp_path, f"git apply /tmp/gold.patch; {EDIT_TESTS}")
    assert found == dict.fromkeys(EVALUATORS, 1.0)


LOCK = """
mkdir locked && touch locked/conftest.py && chmod 555 locked && chmod 000 tests && chmod 555 "$TMPDIR" "$HOME"
"""


async def test_locked_directories_hide_nothing_and_hinder_nobody(tmp_path: Path) -> None:
    """An agent cannot turn a reward of 0 into a failed evaluation, nor does it lose a repair."""
    repaired, locked = await asyncio.gather(
        rewards(1, tmp_path / "repaired", f"git apply /tmp/gold.patch; {LOCK}"),
        rewards(0, tmp_path / "locked", LOCK),
    )
    assert repaired == dict.fromkeys(EVALUATORS, 1.0)
    assert locked == dict.fromkeys(EVALUATORS, 0.0)


def test_the_benchmark_is_large_enough() -> None:
    assert len(ROWS) >= 12
    assert len({row["repo"] for row in ROWS}) >= 6


def test_what_is_committed_is_what_its_source_builds(tmp_path: Path) -> None:
    subprocess.run([sys.executable, SWE_MINI / "build.py", tmp_path], check=True, timeout=120)
    assert (tmp_path / "swe-mini.jsonl").read_text() == (SWE_MINI / "swe-mini.jsonl").read_text()
    assert _differences(filecmp.dircmp(tmp_path / "harbor", SWE_MINI / "harbor")) == []


def _differences(compared: filecmp.dircmp[str]) -> list[str]:
    found = [*compared.left_only, *compared.right_only, *compared.diff_files, *compared.funny_files]
    return found + [name for below in compared.subdirs.values() for name in _differences(below)]
