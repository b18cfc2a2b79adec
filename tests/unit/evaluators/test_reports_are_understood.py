"""What each runner prints, as it prints it, and what is made of it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evaluators.test_reports import (
    Outcome,
    ReportFormat,
    TestCounts,
    TestReport,
    make_report,
    parse_report,
)

P, F, E, S = Outcome.PASSED, Outcome.FAILED, Outcome.ERROR, Outcome.SKIPPED

GO_TEXT = """\
=== RUN   TestSplit
=== RUN   TestSplit/empty
=== RUN   TestSplit/one_word
    split_test.go:21: got [] want [a]
--- FAIL: TestSplit (0.00s)
    --- PASS: TestSplit/empty (0.00s)
    --- FAIL: TestSplit/one_word (0.00s)
=== RUN   TestLater
    split_test.go:30: not now
--- SKIP: TestLater (0.00s)
FAIL
FAIL\texample.com/words\t0.003s
=== RUN   TestJoin
--- PASS: TestJoin (0.01s)
PASS
ok  \texample.com/words/join\t0.012s
?   \texample.com/words/cmd\t[no test files]
FAIL\texample.com/words/broken [build failed]
FAIL
"""
GO = {
    "example.com/words.TestSplit": F,
    "example.com/words.TestSplit/empty": P,
    "example.com/words.TestSplit/one_word": F,
    "example.com/words.TestLater": S,
    "example.com/words/join.TestJoin": P,
    "example.com/words/broken": E,
}
GO_JSON = """\
{"Time":"2024-05-01T10:00:00Z","Action":"start","Package":"example.com/words"}
{"Action":"run","Package":"example.com/words","Test":"TestSplit"}
{"Action":"output","Package":"example.com/words","Test":"TestSplit","Output":"--- PASS: TestSplit (0.00s)\\n"}
{"Action":"pass","Package":"example.com/words","Test":"TestSplit","Elapsed":0}
{"Action":"fail","Package":"example.com/words","Test":"TestCut","Elapsed":0}
{"Action":"skip","Package":"example.com/words","Test":"TestLater","Elapsed":0}
{"Action":"fail","Package":"example.com/words","Elapsed":0.01}
{"Action":"fail","Package":"example.com/broken","Elapsed":0}
"""
JEST = """\
PASS src/sum.test.js
  sum
    ✓ adds (2 ms)
    of negatives
      ✓ adds those too
    ○ skipped is slow
  ✓ stands alone (1 ms)

FAIL src/cut.test.js (5.1 s)
  cut
    ✕ keeps the end (3 ms)
    ✎ todo handles unicode

  ● cut › keeps the end

    expect(received).toBe(expected)
      ✓ this is a quotation of the source

FAIL src/broken.test.js
  ● Test suite failed to run

    SyntaxError: Unexpected token (1:5)

Test Suites: 2 failed, 1 passed, 3 total
Tests:       1 failed, 1 skipped, 1 todo, 3 passed, 6 total
Snapshots:   0 total
"""
CARGO = """\
   Compiling words v0.1.0
running 4 tests
test tests::splits ... ok
test tests::is_slow ... ignored, takes a minute
test tests::joins ... FAILED
test tests::prints - should panic ... printed by the test
ok

failures:

---- tests::joins stdout ----
thread 'tests::joins' panicked at src/lib.rs:10:9

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests words
running 1 test
test src/lib.rs - split (line 3) ... ok
"""
JUNIT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="a" tests="4"><testsuite name="inner">
<testcase classname="pkg.TestA" name="one" time="0.1"/>
<testcase classname="pkg.TestA" name="two"><failure message="no">trace</failure></testcase>
<testcase classname="pkg.TestA" name="three"><skipped/></testcase>
<testcase name="four"><error/><failure/></testcase>
</testsuite></testsuite></testsuites>
"""


@pytest.mark.parametrize(
    ("format", "text", "outcomes"),
    [
        (ReportFormat.GO, GO_TEXT, GO),
        (
            ReportFormat.GO,
            GO_JSON,
            {
                "example.com/words.TestSplit": P,
                "example.com/words.TestCut": F,
                "example.com/words.TestLater": S,
                "example.com/broken": E,
            },
        ),
        (
            ReportFormat.JEST,
            JEST,
            {
                "sum > adds": P,
                "sum > of negatives > adds those too": P,
                "sum > is slow": S,
                "stands alone": P,
                "cut > keeps the end": F,
                "cut > handles unicode": S,
                "src/broken.test.js": E,
            },
        ),
        (
            ReportFormat.CARGO,
            CARGO,
            {
                "tests::splits": P,
                "tests::is_slow": S,
                "tests::joins": F,
                "tests::prints": P,
                "src/lib.rs - split (line 3)": P,
            },
        ),
        (ReportFormat.CARGO, "error: could not compile `words` (lib) due to 2 errors", {"words": E}),
        (
            ReportFormat.JUNIT,
            JUNIT,
            {"pkg.TestA.one": P, "pkg.TestA.two": F, "pkg.TestA.three": S, "four": E},
        ),
    ],
    ids=["go -v", "go -json", "jest", "cargo", "cargo does not compile", "junit"],
)
def test_every_test_has_its_outcome(format: ReportFormat, text: str, outcomes: dict[str, Outcome]) -> None:
    assert parse_report(format, text).outcomes == outcomes


def test_jest_without_names_is_counted() -> None:
    report = parse_report(
        ReportFormat.JEST, "PASS src/a.test.js\n\nTests:       2 failed, 5 passed, 7 total\n"
    )
    assert (report.outcomes, report.counts) == ({}, TestCounts(passed=5, failed=2))


TESTS = '''
import unittest
import pytest

class TestThings(unittest.TestCase):
    def test_good(self):
        print("this is ok", flush=True)
    def test_bad(self):
        self.fail("no")
    def test_broken(self):
        raise KeyError("x")
    @unittest.skip("not now")
    def test_skipped(self): ...
    @unittest.expectedFailure
    def test_known(self):
        self.fail("known")
    @unittest.expectedFailure
    def test_surprise(self):
        """A docstring - with a dash ... ok"""
    def test_documented(self):
        """What it shows."""
'''
PYTEST_ONLY = """

@pytest.mark.parametrize("text", ["a - b", "x[0]"])
def test_text(text):
    assert "-" in text

@pytest.fixture
def bad():
    raise RuntimeError("no")

def test_fixture(bad): ...
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("project")
    (directory / "test_things.py").write_text(TESTS)
    (directory / "test_more.py").write_text(TESTS.replace("Things", "More") + PYTEST_ONLY)
    return directory


def output_of(project: Path, *arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=project, capture_output=True, text=True)
    return f"{done.stdout}\n{done.stderr}"


UNITTEST = {
    "test_good": P,
    "test_bad": F,
    "test_broken": E,
    "test_skipped": S,
    "test_known": S,
    "test_surprise": F,
    "test_documented": P,
}


def test_unittest_itself_is_understood(project: Path) -> None:
    report = parse_report(ReportFormat.UNITTEST, output_of(project, "-m", "unittest", "-v", "test_things"))
    assert report.outcomes == {
        f"test_things.TestThings.{name}": outcome for name, outcome in UNITTEST.items()
    }


def test_unittest_without_names_is_counted(project: Path) -> None:
    report = parse_report(ReportFormat.UNITTEST, output_of(project, "-m", "unittest", "test_things"))
    assert report.counts == TestCounts(passed=2, failed=3, skipped=2)
    assert report.outcomes["test_things.TestThings.test_bad"] is F


def test_older_unittest_names_tests_alike() -> None:
    lines = "test_a (pkg.tests.TestA) ... ok\ntest_b (pkg.tests.TestA.test_b) ... ok\n"
    assert set(parse_report(ReportFormat.UNITTEST, lines).outcomes) == {
        "pkg.tests.TestA.test_a",
        "pkg.tests.TestA.test_b",
    }


@pytest.mark.parametrize("arguments", [("-rA",), ("-v",), ("-rA", "-v", "--color=yes")], ids=str)
def test_pytest_itself_is_understood(project: Path, arguments: tuple[str, ...]) -> None:
    options = ("-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments, "test_more.py")
    report = parse_report(ReportFormat.PYTEST, output_of(project, *options))
    expected = {f"test_more.py::TestMore::{name}": outcome for name, outcome in UNITTEST.items()}
    expected["test_more.py::TestMore::test_broken"] = F
    expected["test_more.py::test_text[a - b]"] = P
    expected["test_more.py::test_text[x[0]]"] = F
    expected["test_more.py::test_fixture"] = E
    if "-v" not in arguments:
        del expected["test_more.py::TestMore::test_skipped"]
    named = dict(report.outcomes)
    assert named == expected
    assert report.counts == TestCounts(passed=3, failed=5, skipped=2)


def test_short_pytest_is_counted(project: Path) -> None:
    report = parse_report(
        ReportFormat.PYTEST,
        output_of(project, "-m", "pytest", "-p", "no:cacheprovider", "-q", "test_more.py"),
    )
    assert report.counts == TestCounts(passed=3, failed=5, skipped=2)


def test_a_file_that_pytest_cannot_load_is_an_error() -> None:
    text = textwrap.dedent("""\
        ==================================== ERRORS ====================================
        =========================== short test summary info ============================
        ERROR tests/test_x.py - ModuleNotFoundError: No module named 'x'
        ERROR    root:x.py:3 a log record is not a test
        !!!!!!!!!!!!!!!!!!!! Interrupted: 1 error during collection !!!!!!!!!!!!!!!!!!!!
        =============================== 1 error in 0.12s ===============================
    """)
    report = parse_report(ReportFormat.PYTEST, text)
    assert (report.outcomes, report.counts) == ({"tests/test_x.py": E}, TestCounts(failed=1))


def test_of_contradicting_reports_the_worse_is_believed() -> None:
    forged = "test_a (m.T.test_a) ... ok\n"
    real = "test_a (m.T.test_a) ... FAIL\n\nRan 1 test in 0.001s\n\nFAILED (failures=1)\n"
    closing = "Ran 9 tests in 0.001s\n\nOK\n"
    for text in (forged + real + closing, real + forged, closing + real):
        report = parse_report(ReportFormat.UNITTEST, text)
        assert report.outcomes == {"m.T.test_a": F}
        assert report.has_failures


def test_entities_are_not_expanded() -> None:
    assert parse_report(ReportFormat.JUNIT, "<!DOCTYPE x [<!ENTITY a 'b'>]><testcase name='&a;'/>").is_empty


@pytest.mark.parametrize("format", ReportFormat)
@given(text=st.text(st.sampled_from('tes_a.:-> ()[]{}=\n\t0123FAILDPSokRn✓✕●✎"<>/\x1b'), max_size=300))
def test_no_text_breaks_a_parser(format: ReportFormat, text: str) -> None:
    report = parse_report(format, text)
    counts = report.counts
    assert counts.failed >= sum(outcome.is_bad for outcome in report.outcomes.values())
    assert min(counts.passed, counts.failed, counts.skipped) >= 0


LONG_LINES = [
    *(("", "a.py::", ""), ("a.py::x", " PASSED (", ""), ("a.py::x PASSED", " ", "[")),
    *(("a.py::x PASSED (", ")", "."), ("", "1 passed, ", ""), ("Ran ", "1", " tests in 1s")),
    *(("Tests: ", "1", ""), ("Tests: ", "1", " total"), ("Tests:", " ", "1"), ("  ✓ ", " (1", "")),
    *(("test_a (m.T) ... ", "ok ", "."), ("FAILED (", "a", ")"), ("test a ... ", "ok <1", "")),
    *(("ok", " ", "p"), ("  --- PASS: ", "T (1s", ""), ("\x1b[", "1", ""), ("", "1", "x")),
]
"""How each begins, what it repeats, and how it ends."""
_READ_ALL = """
import json, sys
from polar.evaluators.command import _NUMBER
from polar.evaluators.test_reports import ReportFormat, parse_report
for line in json.load(sys.stdin):
    for format in ReportFormat:
        parse_report(format, f"PASS a.test.js\\nRan 1 test in 1s\\n{line}\\n")
    _NUMBER.fullmatch(line)
"""


def test_no_line_is_too_long_for_a_parser() -> None:
    """Code under test decides how long a line is; time that grows with its square would stop the node."""
    lines = [start + part * (300_000 // len(part)) + end for start, part, end in LONG_LINES]
    given = json.dumps(lines)
    subprocess.run([sys.executable, "-c", _READ_ALL], input=given, text=True, check=True, timeout=120)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (ReportFormat.PYTEST, f"{'9' * 5_000} passed in 1.0s"),
        (ReportFormat.UNITTEST, f"Ran {'9' * 5_000} tests in 1.0s\n\nOK"),
        (ReportFormat.UNITTEST, "Ran 1 test in 1.0s\n\nFAILED (failures=\u00b2)"),
        (ReportFormat.JEST, f"Tests: {'9' * 5_000} passed, 1 total"),
        (ReportFormat.GO, '{"Action": "pass", "Package": ["p"], "Test": "TestA"}'),
    ],
)
def test_what_is_no_number_or_name_breaks_no_parser(format: ReportFormat, text: str) -> None:
    assert parse_report(format, text).counts.passed < 10**9


def test_go_tests_that_print_events_of_their_own_hide_nothing() -> None:
    forged = (
        '{"Action":"pass","Package":"p","Test":"TestA"}\n{"Action":"fail","Package":"p","Test":"TestB"}\n'
    )
    real = "--- FAIL: TestA (0.00s)\n--- PASS: TestC (0.00s)\nFAIL\nFAIL\tp\t0.003s\n"
    assert parse_report(ReportFormat.GO, forged + real).outcomes == {"p.TestA": F, "p.TestB": F, "p.TestC": P}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(Outcome))))
def test_one_failure_of_a_test_is_its_outcome(results: list[tuple[str, Outcome]]) -> None:
    report = make_report(results)
    for name, outcome in report.outcomes.items():
        assert outcome.is_bad == any(other.is_bad for test, other in results if test == name)
    assert dict(report.outcomes) == dict(make_report(reversed(results)).outcomes)


def test_an_empty_report_is_empty() -> None:
    assert TestReport().is_empty
    assert not make_report([("a", S)]).is_empty
