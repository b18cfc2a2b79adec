"""Rows graded with the official `swebench` package, beside its own verdict on the same logs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polar.config import plugins
from polar.errors import InvalidInput
from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.swebench import END, START, SweRow, procedure_of
from polar.evaluators.tests import TestReward, grade
from polar.models.component import Component
from tests.evaluations import agent_does, evaluate, evaluation, make_task

TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
new file mode 100644
--- /dev/null
+++ b/tests/test_calc.py
@@ -0,0 +1,6 @@
+import unittest
+import calc
+class CalcTest(unittest.TestCase):
+    def test_three(self): self.assertEqual(calc.double(3), 6)
+    def test_two(self): self.assertEqual(calc.double(2), 4)
+    def test_skipped(self): self.skipTest("not now")
"""
FILES = {"calc.py": "def double(x):\n    return x + 2\n", "tests/__init__.py": ""}
ROW: dict[str, Any] = {
    "instance_id": "mini__calc-1",
    "repo": "mini/calc",
    "base_commit": "0" * 40,
    "version": "1.0",
    "problem_statement": "double is wrong",
    "hints_text": "columns that nobody asked for are ignored",
    "test_patch": TEST_PATCH,
    "FAIL_TO_PASS": json.dumps(["tests.test_calc.CalcTest.test_three"]),
    "PASS_TO_PASS": ["tests.test_calc.CalcTest.test_two"],
    "test_cmd": "python3 -m unittest -v tests.test_calc",
    "log_parser": "unittest",
}
FIX = "printf 'def double(x):\\n    return 2 * x\\n' > calc.py"


async def rewards(row: dict[str, Any], directory: Path) -> tuple[float, float]:
    """Before and after the repair."""
    async with evaluation(make_task(FILES, runtime="process"), directory) as context:
        before = await evaluate(context, "swebench", row=row)
        await agent_does(context, f"{FIX}; echo 'raise SystemExit' > tests/test_calc.py")
        after = await evaluate(context, "swebench", row=row)
        return before.reward, after.reward


async def test_a_row_says_itself_how_it_is_graded(tmp_path: Path) -> None:
    assert await rewards(ROW, tmp_path) == (0.0, 1.0)


async def test_official_parsers_are_known_by_name(tmp_path: Path) -> None:
    """Django's runner prints what unittest prints; its parser keeps the names as they are printed."""
    named = "test_{0} (tests.test_calc.CalcTest.test_{0})"
    row = {
        **ROW,
        "log_parser": "parse_log_django",
        "FAIL_TO_PASS": [named.format("three")],
        "PASS_TO_PASS": [named.format("two")],
    }
    assert await rewards(row, tmp_path) == (0.0, 1.0)


async def test_rows_may_carry_the_whole_script(tmp_path: Path) -> None:
    script = f"""#!/bin/bash
set -uxo pipefail
git apply -v - <<'EOF_TESTS'
{TEST_PATCH}
EOF_TESTS
: '{START}'
python3 -m unittest -v tests.test_calc
: '{END}'
rm tests/test_calc.py
"""
    row = {**ROW, "test_cmd": None, "eval_script": script}
    assert await rewards(row, tmp_path) == (0.0, 1.0)


ASTROPY: dict[str, Any] = {
    "instance_id": "astropy__astropy-12907",
    "repo": "astropy/astropy",
    "base_commit": "d16bfe05a744909de4b27f5875fe0d4ed41ce607",
    "version": "4.3",
    "test_patch": TEST_PATCH.replace("tests/test_calc.py", "astropy/modeling/tests/test_separable.py"),
    "FAIL_TO_PASS": '["astropy/modeling/tests/test_separable.py::test_separable[6-result6]"]',
    "PASS_TO_PASS": '["astropy/modeling/tests/test_separable.py::test_coord_matrix"]',
}
DJANGO: dict[str, Any] = {
    **ASTROPY,
    "instance_id": "django__django-11099",
    "repo": "django/django",
    "version": "3.0",
    "FAIL_TO_PASS": '["test_ascii_validator (auth_tests.test_validators.UsernameValidatorsTests)"]',
    "PASS_TO_PASS": '["test_help_text (auth_tests.test_validators.UserAttributeTest)"]',
}
ASTROPY_IDS = [*json.loads(ASTROPY["FAIL_TO_PASS"]), *json.loads(ASTROPY["PASS_TO_PASS"])]
DJANGO_IDS = [*json.loads(DJANGO["FAIL_TO_PASS"]), *json.loads(DJANGO["PASS_TO_PASS"])]


@pytest.mark.parametrize(("fixed", "kept"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("row", [ASTROPY, DJANGO], ids=["astropy", "django"])
def test_the_verdict_is_the_official_one(
    row: dict[str, Any], fixed: bool, kept: bool, tmp_path: Path
) -> None:
    from swebench.harness.grading import get_eval_report

    lines = (
        [
            f"{'PASSED' if good else 'FAILED'} {name}"
            for name, good in zip(ASTROPY_IDS, (fixed, kept), strict=True)
        ]
        if row is ASTROPY
        else [
            f"{name} ... {'ok' if good else 'FAIL'}"
            for name, good in zip(DJANGO_IDS, (fixed, kept), strict=True)
        ]
    )
    log = "\n".join(["+ git apply -v -", f"+ : '{START}'", *lines, f"+ : '{END}'", "Updated 1 path"])
    file = tmp_path / "log"
    file.write_text(log)
    expected = {name: json.loads(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    spec: Any = SimpleNamespace(**{**row, **expected})
    prediction = {"instance_id": row["instance_id"], "model_patch": "x", "model_name_or_path": "m"}
    official = get_eval_report(spec, prediction, str(file), include_tests_status=False)
    swe = SweRow.model_validate(row)
    ours = grade(procedure_of(swe).parse(log), 0, swe.expected, TestReward.ALL_PASS)
    assert ours.reward == float(official[row["instance_id"]]["resolved"]) == float(fixed and kept)


@pytest.mark.parametrize("row", [ASTROPY, DJANGO], ids=["astropy", "django"])
def test_the_official_script_is_had_without_a_network(row: dict[str, Any]) -> None:
    procedure = procedure_of(SweRow.model_validate(row))
    assert "test_separable" in procedure.script
    assert START in procedure.script
    assert procedure.applies_test_patch


def test_a_log_without_the_markers_is_worth_nothing() -> None:
    swe = SweRow.model_validate(ASTROPY)
    log = "\n".join(f"PASSED {name}" for name in ASTROPY_IDS)
    assert procedure_of(swe).parse(log).is_empty


async def test_a_repository_without_specification_is_named(context_of_nothing: EvaluationContext) -> None:
    row = {name: value for name, value in ROW.items() if name not in ("test_cmd", "log_parser")}
    with pytest.raises(EvaluationFailed, match=r"no specification for mini/calc '1\.0'.*test_cmd"):
        await evaluate(context_of_nothing, "swebench", row=row)


@pytest.fixture
async def context_of_nothing(tmp_path: Path) -> Any:
    async with evaluation(make_task(FILES, runtime="process"), tmp_path) as context:
        yield context


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS: .*list of test ids"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS: must name at least one test"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS"),
        ({"instance_id": ""}, "instance_id"),
        ({"test_patch": "not a patch"}, "test_patch: .*unified diff"),
        ({"log_parser": None}, "log_parser: is required"),
        ({"log_parser": "mine"}, "log_parser: must be one of"),
    ],
    ids=str,
)
def test_malformed_rows_name_their_field(change: dict[str, Any], problem: str) -> None:
    options = {"row": {**ROW, **change}}
    with pytest.raises(InvalidInput, match=rf"(?s)evaluator\.options\.row.*{problem}"):
        plugins.create("evaluators", "evaluator", Component(name="swebench", options=options))
