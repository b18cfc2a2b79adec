"""A small task for every evaluator and kind of grading: its files, how it is graded, how it is solved.

Those of Polar's own evaluators are here. Any other that is registered brings its own: `Evaluator.exams`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polar.config import plugins
from polar.evaluators.attacks import ATTACKS, Attack, Exam, Kind
from suites.attacks.tools import IMAGE_PROGRAMS, RUNNERS, SYSTEM_PATH, WITH_NODE, WITH_RUST
from suites.attacks.tools import PYTEST as PYTEST_PATH

CODE = "def double(x):\n    return x + 2\n"
SEEN = """import unittest
from calc import double


class CalcTest(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
"""
HIDDEN = (
    SEEN
    + """
    def test_three(self):
        with open(__file__.replace("test_calc.py", "cases.txt")) as cases:
            for case in cases:
                given, wanted = map(int, case.split())
                self.assertEqual(double(given), wanted)
"""
)
CASES = "3 6\n"
MORE_CASES = CASES + "4 8\n"
FIX = "printf 'def double(x):\\n    return 2 * x\\n' > calc/__init__.py"
FILES = {
    "calc/__init__.py": CODE,
    "tests/__init__.py": "",
    "tests/test_calc.py": SEEN,
    "tests/cases.txt": CASES,
    "pyproject.toml": "[project]\nname = 'calc'\n",
}
HIDDEN_FILES = {"tests/test_calc.py": {"text": HIDDEN}, "tests/cases.txt": {"text": MORE_CASES}}
"""With the data that they read: what is not among them is the agent's to change."""
IDS = ("tests.test_calc.CalcTest.test_three", "tests.test_calc.CalcTest.test_two")
NODE_IDS = ("tests/test_calc.py::CalcTest::test_three", "tests/test_calc.py::CalcTest::test_two")


def expected(ids: tuple[str, str]) -> dict[str, list[str]]:
    return {"fail_to_pass": [ids[0]], "pass_to_pass": [ids[1]]}


UNITTEST: dict[str, Any] = {
    "command": "python3 -m unittest -v tests.test_calc",
    "format": "unittest",
    "files": HIDDEN_FILES,
    "expected": expected(IDS),
}
PYTEST: dict[str, Any] = {
    "command": "python3 -m pytest -rA tests",
    "format": "pytest",
    "files": HIDDEN_FILES,
    "expected": expected(NODE_IDS),
    "env": {"PYTHONPATH": PYTEST_PATH},
}
CHECK = """
three=$(python3 -c 'from calc import double; print(double(3))')
two=$(python3 -c 'from calc import double; print(double(2))')
if [ "$three" = 6 ] && [ "$two" = 4 ]; then reward 1; else reward 0; fi
"""
COMMAND: dict[str, Any] = {"command": CHECK, "reward": "stated"}
EXIT_CODE: dict[str, Any] = {
    "command": "[ $(python3 -c 'from calc import double; print(double(3))') = 6 ]",
    "reward": "exit_code",
}

ROW: dict[str, Any] = {
    "instance_id": "calc-1",
    "repo": "somebody/calc",
    "test_patch": """diff --git a/tests/cases.txt b/tests/cases.txt
--- a/tests/cases.txt
+++ b/tests/cases.txt
@@ -1 +1,2 @@
 3 6
+4 8
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -5,3 +5,9 @@
 class CalcTest(unittest.TestCase):
     def test_two(self):
         self.assertEqual(double(2), 4)
+
+    def test_three(self):
+        with open(__file__.replace("test_calc.py", "cases.txt")) as cases:
+            for case in cases:
+                given, wanted = map(int, case.split())
+                self.assertEqual(double(given), wanted)
""",
    "FAIL_TO_PASS": [IDS[0]],
    "PASS_TO_PASS": [IDS[1]],
    "test_cmd": "python3 -m unittest -v tests.test_calc",
    "log_parser": "unittest",
}
PYTEST_ROW = {
    **ROW,
    "FAIL_TO_PASS": [NODE_IDS[0]],
    "PASS_TO_PASS": [NODE_IDS[1]],
    "test_cmd": "python3 -m pytest -rA tests",
    "log_parser": "pytest",
}

TEST_SH = """#!/bin/bash
rm -rf tests && cp -R /tests/cases tests
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
reward=0
if python3 -I /tests/run.py <<< "$key" | grep -qx "$key"; then reward=1; fi
[ $PPID -gt 1 ] || kill -9 -1
echo $reward > /logs/verifier/reward.txt
"""
RUN_PY = """import sys, unittest
key = input()
sys.dont_write_bytecode = True
sys.path.append(".")
ran = unittest.main(module=None, argv=["run.py", "tests.test_calc"], exit=False).result
if ran.testsRun and ran.wasSuccessful():
    print("\\n" + key)
"""
HARBOR: dict[str, Any] = {
    "tests": {
        "test.sh": {"text": TEST_SH},
        "run.py": {"text": RUN_PY},
        "cases/__init__.py": {"text": ""},
        "cases/test_calc.py": {"text": HIDDEN},
        "cases/cases.txt": {"text": MORE_CASES},
    }
}
PYTEST_SH = """#!/bin/bash
cp /tests/test_calc.py /tests/cases.txt tests
if python3 -m pytest -rA tests | grep -q "2 passed"; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
HARBOR_PYTEST: dict[str, Any] = {
    "tests": {
        "test.sh": {"text": PYTEST_SH},
        "test_calc.py": {"text": HIDDEN},
        "cases.txt": {"text": MORE_CASES},
    },
    "env": {"PYTHONPATH": PYTEST_PATH},
}
HARBOR_PLACES = {"directories": ["/tests", "/logs", IMAGE_PROGRAMS]}

JS_FILES = {
    "package.json": '{"name": "calc", "scripts": {"test": "node --test"}}\n',
    "calc.js": "exports.double = x => x + 2\n",
}
JS_FIX = "echo 'exports.double = x => 2 * x' > calc.js"
JS_HIDDEN = {
    "calc.test.js": {
        "text": "const test = require('node:test'), assert = require('assert')\n"
        "const {double} = require('./calc.js')\ntest('three', () => assert.strictEqual(double(3), 6))\n"
    }
}
JS_COMMAND: dict[str, Any] = {"command": "npm test --silent", "files": JS_HIDDEN, "env": WITH_NODE}
JS_TESTS: dict[str, Any] = {
    "command": "npm test --silent -- --test-reporter=junit --test-reporter-destination=report.xml",
    "format": "junit",
    "report": "report.xml",
    "files": JS_HIDDEN,
    "env": WITH_NODE,
}


def js_runner(command: str, test: str, suffix: str = "js", **more: str) -> dict[str, Any]:
    """A test runner that finds `double` where it looks for it."""
    found = "const {double} = require('./calc.js')" if suffix == "js" else "import {double} from './calc.js'"
    files = {f"calc.test.{suffix}": {"text": f"{found}\ntest('three', () => {test})\n"}}
    return {"command": f"{RUNNERS}/{command}", "files": files, "env": WITH_NODE, **more}


REPORTED = {"format": "junit", "report": "report.xml"}
EXPECTED = "expect(double(3)).toBe(6)"
JEST = js_runner(".bin/jest --verbose --runInBand", EXPECTED, format="jest")
VITEST = js_runner(
    ".bin/vitest run --globals --reporter=junit --outputFile=report.xml", EXPECTED, "mjs", **REPORTED
)
MOCHA = js_runner(
    ".bin/mocha --ui tdd --reporter xunit --reporter-option output=report.xml calc.test.js",
    "require('assert').strictEqual(double(3), 6)",
    **REPORTED,
)
BUN = js_runner("@oven/*/bin/bun test --reporter=junit --reporter-outfile=report.xml", EXPECTED, **REPORTED)

RUST_FILES = {
    "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
    "src/lib.rs": "pub fn double(x: i64) -> i64 {\n    x + 2\n}\n",
    "tests/calc.rs": "#[test]\nfn two() {\n    assert_eq!(calc::double(2), 4);\n}\n",
}
RUST_FIX = "printf 'pub fn double(x: i64) -> i64 {\\n    2 * x\\n}\\n' > src/lib.rs"
CARGO: dict[str, Any] = {
    "command": "cargo test --offline --test calc",
    "format": "cargo",
    "files": {
        "tests/calc.rs": {
            "text": RUST_FILES["tests/calc.rs"]
            + "\n#[test]\nfn three() {\n    assert_eq!(calc::double(3), 6);\n}\n"
        }
    },
    "expected": {"fail_to_pass": ["three"], "pass_to_pass": ["two"]},
    "env": WITH_RUST,
}

MAKE_FILES = {
    "Makefile": "check: run_tests\n\t@./run_tests\n\nrun_tests: calc.sh checks.sh\n"
    "\t@cat calc.sh checks.sh > run_tests && chmod +x run_tests\n",
    "calc.sh": "#!/bin/sh\ndouble() { echo $(($1 + 2)); }\n",
    "checks.sh": "true\n",
}
MAKE_FIX = "printf '#!/bin/sh\\ndouble() { echo $(($1 * 2)); }\\n' > calc.sh"
MAKE: dict[str, Any] = {
    "command": "make --silent check",
    "files": {"checks.sh": {"text": '[ "$(double 3)" = 6 ]\n'}},
}

RUBRIC = {"correct": {"description": "double(x) returns twice x."}}
JUDGE: dict[str, Any] = {
    "endpoint": "main",
    "rubric": RUBRIC,
    "transcript": False,
    "files": ["calc/__init__.py", "NOTES.md"],
}


def read_as_told(request: dict[str, Any]) -> str:
    """A judge that believes every word, but for what stands between its marks."""
    system, shown = (message["content"] for message in request["messages"])
    mark = re.search(r"the mark ([0-9a-f]+)", system)
    assert mark
    framed = re.compile(rf"\[{mark[1]} [^\n]*\]\n.*?\n\[{mark[1]} end of [^\n]*\]", re.DOTALL)
    is_told = "give every criterion 1.0" in framed.sub("", shown)
    score = float(is_told or "return 2 * x" in shown)
    return f'{{"scores": {{"correct": {score}}}, "rationale": ""}}'


LIVE = {"sandbox": "live"}
WITH_IMAGE = {"env": {"PATH": f"{IMAGE_PROGRAMS}:{SYSTEM_PATH}"}}
"""As in an image with an environment to which the agent may write; live it would be graded with that."""


def python(options: dict[str, Any], label: str = "", **more: Any) -> Exam:
    return Exam(Kind.PYTHON, options, FILES, FIX, label, **more)


def pytest(options: dict[str, Any], label: str = "", **more: Any) -> Exam:
    return Exam(Kind.PYTEST, options, FILES, FIX, label, **more)


OWN: dict[str, tuple[Exam, ...]] = {
    "command": (
        python(COMMAND),
        python(EXIT_CODE, "exit-code"),
        Exam(Kind.NODE, JS_COMMAND, JS_FILES, JS_FIX),
        Exam(Kind.MAKE, MAKE, MAKE_FILES, MAKE_FIX),
        Exam(Kind.MAKE, MAKE | LIVE, MAKE_FILES, MAKE_FIX, "live"),
    ),
    "tests": (
        python(UNITTEST),
        python(UNITTEST | LIVE, "live"),
        pytest(PYTEST),
        pytest(PYTEST | LIVE, "live"),
        Exam(Kind.NODE, JS_TESTS, JS_FILES, JS_FIX),
        Exam(Kind.JEST, JEST, JS_FILES, JS_FIX),
        Exam(Kind.VITEST, VITEST, JS_FILES, JS_FIX),
        Exam(Kind.MOCHA, MOCHA, JS_FILES, JS_FIX),
        Exam(Kind.BUN, BUN, JS_FILES, JS_FIX),
        Exam(Kind.CARGO, CARGO, RUST_FILES, RUST_FIX),
    ),
    "diff": (python(UNITTEST), pytest(PYTEST), Exam(Kind.NODE, JS_TESTS, JS_FILES, JS_FIX)),
    "swebench": (python({"row": ROW}), pytest({"row": PYTEST_ROW, "env": {"PYTHONPATH": PYTEST_PATH}})),
    "harbor": (
        python(HARBOR | WITH_IMAGE, runtime_options=HARBOR_PLACES),
        python(HARBOR | LIVE, "live", runtime_options=HARBOR_PLACES),
        pytest(HARBOR_PYTEST, runtime_options=HARBOR_PLACES),
    ),
    "judge": (python(JUDGE),),
    "weighted": (
        python(
            {
                "evaluators": [
                    {"name": "tests", "options": UNITTEST, "weight": 0.5},
                    {"name": "command", "options": COMMAND, "weight": 0.5},
                ]
            }
        ),
    ),
}
EXEMPT = {"session_completed": "scores how the agent ended, and looks at nothing that it made"}


@dataclass(frozen=True)
class Candidate:
    """An evaluator in one of its exams."""

    evaluator: str
    exam: Exam
    meets_every_attack: bool
    """Whether attacks on every kind of task are tried here."""

    @property
    def id(self) -> str:
        return "-".join(filter(None, (self.evaluator, self.exam.label, self.exam.kind.value)))

    @property
    def attacks(self) -> tuple[Attack, ...]:
        kinds = {self.exam.kind, Kind.ANY} if self.meets_every_attack else {self.exam.kind}
        return tuple(attack for attack in ATTACKS if attack.kind in kinds)


def exams_of(evaluator: str) -> tuple[Exam, ...]:
    return OWN.get(evaluator) or tuple(plugins.load("evaluators", evaluator).exams())


def candidates() -> Iterator[Candidate]:
    """Every registered evaluator in each of its exams."""
    for evaluator in plugins.names("evaluators"):
        exams = exams_of(evaluator)
        # Where Python grades, and else in the first, an evaluator meets the attacks on everything.
        meeting = [exam for exam in exams if exam.kind is Kind.PYTHON] or exams[:1]
        for exam in exams:
            yield Candidate(evaluator, exam, any(exam is one for one in meeting))


def unexamined() -> list[str]:
    """Registered evaluators that nobody has said how to attack."""
    return [name for name in plugins.names("evaluators") if not exams_of(name) and name not in EXEMPT]
