"""Parses the output of test runners, in each of their report formats, into the outcomes of tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from xml.etree import ElementTree


class Outcome(StrEnum):
    """How one test ended, from best to worst."""

    PASSED = "passed"
    SKIPPED = "skipped"
    """Includes expected failures, since code under test can declare any failure expected."""
    FAILED = "failed"
    """Includes tests that passed although they were expected to fail."""
    ERROR = "error"
    """The test could not run: its set-up failed, or its file or package does not load or build."""

    @property
    def is_bad(self) -> bool:
        return self in (Outcome.FAILED, Outcome.ERROR)


_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}
Results = Iterator[tuple[str, Outcome]]


@dataclass(frozen=True, slots=True)
class TestCounts:
    """The runner's own summary."""

    passed: int = 0
    failed: int = 0
    """The number of failures and errors."""
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class TestReport:
    """The tests that a report names, and the number of each outcome."""

    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """Outcomes by test id. A test reported twice has the worse outcome."""
    counts: TestCounts = TestCounts()
    """At least the counts of `outcomes`; higher if the runner only counts passed tests."""

    __test__ = False

    @property
    def is_empty(self) -> bool:
        return not self.outcomes and self.counts == TestCounts()

    @property
    def has_failures(self) -> bool:
        return self.counts.failed > 0


def make_report(results: Iterable[tuple[str, Outcome]], summaries: Iterable[TestCounts] = ()) -> TestReport:
    """Build a report; code under test may print results too, so the worse of two contradictory ones
    counts."""
    outcomes: dict[str, Outcome] = {}
    for name, outcome in results:
        known = outcomes.get(name)
        outcomes[name] = outcome if known is None else max(known, outcome, key=_RANK.__getitem__)
    summary = max(summaries, key=lambda counts: (counts.failed, -counts.passed), default=TestCounts())
    ended = list(outcomes.values())
    counts = TestCounts(
        passed=max(ended.count(Outcome.PASSED), summary.passed),
        failed=max(sum(outcome.is_bad for outcome in ended), summary.failed),
        skipped=max(ended.count(Outcome.SKIPPED), summary.skipped),
    )
    return TestReport(outcomes, counts)


_NUMBER = r"[0-9]{1,9}"
"""A count: runners print no longer ones, and Python refuses to parse thousands of digits."""


def _tally(found: Iterable[tuple[str, str]], *kinds: tuple[str, ...]) -> TestCounts:
    """Sum up (number, kind) pairs as passed, failed and skipped, given the runner's names for each."""
    counted = {kind: int(number) for number, kind in found}
    return TestCounts(*(sum(counted.get(kind, 0) for kind in names) for names in kinds))


_PYTEST_OUTCOMES = {
    "PASSED": Outcome.PASSED,
    "XFAIL": Outcome.SKIPPED,
    "SKIPPED": Outcome.SKIPPED,
    "FAILED": Outcome.FAILED,
    "XPASS": Outcome.PASSED,
    "ERROR": Outcome.ERROR,
}
_PYTEST_WORDS = "|".join(_PYTEST_OUTCOMES)
_PYTEST_SUMMARY = re.compile(rf"({_PYTEST_WORDS}) (\S.*)")
_PYTEST_FILE = re.compile(r"\S+?\.py::.")
_PYTEST_OUTCOME = re.compile(rf" ({_PYTEST_WORDS})(?= \(|$)")
_PYTEST_PERCENT = re.compile(r"\[\s*\d+%\]")
_PYTEST_CLOSING = re.compile(
    rf"(?:=+ )?((?:{_NUMBER} [a-z]+, )*{_NUMBER} [a-z]+) in [\d.]+s(?: \([\d:, a-z]+\))?(?: =+)?"
)
_PYTEST_COUNT = re.compile(rf"({_NUMBER}) ([a-z]+)")


def _pytest_results(lines: list[str]) -> Results:
    """Read `-rA` summary lines and `-v` progress lines."""
    for line in lines:
        if progress := _pytest_progress(line):
            yield progress
        elif match := _PYTEST_SUMMARY.fullmatch(line):
            name = _pytest_id(match[2])
            # "SKIPPED [2] file:3: why" names no test, and log lines may begin with the same words.
            if "::" in name or (match[1] == "ERROR" and name.endswith(".py")):
                yield name, _PYTEST_OUTCOMES[match[1]]


def _pytest_progress(line: str) -> tuple[str, Outcome] | None:
    """Parse `id OUTCOME` with optional `(reason)` and `[ 50%]`, in time linear in the line."""
    file = _PYTEST_FILE.match(line)
    if file is None:
        return None
    line = line.rstrip()
    head, bracket, rest = line.rpartition("[")
    if _PYTEST_PERCENT.fullmatch(bracket + rest) and head[-1:].isspace():
        line = head.rstrip()
    for match in _PYTEST_OUTCOME.finditer(line, file.end()):
        if match.end() == len(line) or line.endswith(")"):
            return line[: match.start()], _PYTEST_OUTCOMES[match[1]]
    return None


def _pytest_id(text: str) -> str:
    """Return the id in `id - reason`; the parameters of an id may contain the separator."""
    head, separator, _ = text.partition(" - ")
    if not separator or head.count("[") <= head.count("]"):
        return head.strip()
    end = text.find("]")
    return text[: end + 1] if end >= 0 else text.strip()


def _pytest_closings(lines: list[str]) -> Iterator[TestCounts]:
    for line in lines:
        if match := _PYTEST_CLOSING.fullmatch(line.strip()):
            passed, failed = ("passed", "xpassed"), ("failed", "error", "errors")
            yield _tally(_PYTEST_COUNT.findall(match[1]), passed, failed, ("skipped", "xfailed"))


_UNITTEST_OUTCOMES = {
    "ok": Outcome.PASSED,
    "expected failure": Outcome.SKIPPED,
    "FAIL": Outcome.FAILED,
    "unexpected success": Outcome.FAILED,
    "ERROR": Outcome.ERROR,
}
_UNITTEST_TEST = re.compile(r"(\w+) \(([\w.<>]+)\)(?: (?:\(.*\)|\[.*\]))?")
_UNITTEST_ENDING = re.compile(
    r"(?:.* \.\.\. |.*?)(ok|expected failure|FAIL|unexpected success|ERROR|skipped(?: .*)?)"
)
_UNITTEST_HEADING = re.compile(r"(FAIL|ERROR|UNEXPECTED SUCCESS): (.+)")
_UNITTEST_RAN = re.compile(rf"Ran ({_NUMBER}) tests? in [\d.]+s")
_UNITTEST_RESULT = re.compile(r"(?:OK|FAILED|NO TESTS RAN)(?: \((.*)\))?")


def _unittest_results(lines: list[str]) -> Results:
    """Read verbose lines, `name (where) ... ok`; a docstring or printed output may be in between."""
    pending: str | None = None
    for line in lines:
        if match := _UNITTEST_HEADING.fullmatch(line):
            pending = None
            if test := _UNITTEST_TEST.match(match[2]):
                yield _unittest_id(test), Outcome.ERROR if match[1] == "ERROR" else Outcome.FAILED
            continue
        start, dots, rest = line.partition(" ... ")
        if test := _UNITTEST_TEST.fullmatch(start):
            pending = _unittest_id(test)
            ending = rest.strip() if dots else ""
        else:
            ending = line.strip() if not dots else line
        if pending and (match := _UNITTEST_ENDING.fullmatch(ending)):
            yield pending, _UNITTEST_OUTCOMES.get(match[1], Outcome.SKIPPED)
            pending = None


def _unittest_id(test: re.Match[str]) -> str:
    """Return `module.Class.method`; before Python 3.11 the parentheses lacked the method."""
    method, where = test[1], test[2]
    return where if where.endswith(f".{method}") else f"{where}.{method}"


def _unittest_summaries(lines: list[str]) -> Iterator[TestCounts]:
    ran: int | None = None
    for line in lines:
        if match := _UNITTEST_RAN.fullmatch(line):
            ran = int(match[1])
        elif ran is not None and (match := _UNITTEST_RESULT.fullmatch(line)):
            parts = (part.partition("=") for part in (match[1] or "").split(","))
            found = ((number, kind.strip()) for kind, _, number in parts if re.fullmatch(_NUMBER, number))
            left_out = ("skipped", "expected failures")
            counts = _tally(found, (), ("failures", "errors", "unexpected successes"), left_out)
            yield replace(counts, passed=max(0, ran - counts.failed - counts.skipped))
            ran = None


_GO_OUTCOMES = {"PASS": Outcome.PASSED, "FAIL": Outcome.FAILED, "SKIP": Outcome.SKIPPED}
_GO_TEST = re.compile(r"\s*--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)")
_GO_PACKAGE = re.compile(r"(ok|FAIL|---|\?)\s+(\S+)\s+(?:[\d.]+s|\(cached\)|\[.*\]).*")
_GO_BROKEN = re.compile(r"FAIL\s+(\S+) \[(build|setup) failed\]")


def _go_results(lines: list[str]) -> Results:
    """Read both JSON events and text: code under test may print either."""
    yield from _go_from_events([event for line in lines if (event := _go_event(line))])
    yield from _go_from_text(lines)


def _go_event(line: str) -> dict[str, str] | None:
    if not line.startswith("{"):
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "Action" not in document:
        return None
    return {name: value for name, value in document.items() if isinstance(value, str)}


def _go_from_events(events: list[dict[str, str]]) -> Results:
    with_tests = {event.get("Package") for event in events if event.get("Test")}
    for event in events:
        outcome = _GO_OUTCOMES.get(event.get("Action", "").upper())
        package, test = event.get("Package"), event.get("Test")
        if outcome is None:
            continue
        if test:
            yield f"{package}.{test}", outcome
        elif outcome is Outcome.FAILED and package not in with_tests:
            yield str(package), Outcome.ERROR


def _go_from_text(lines: list[str]) -> Results:
    """Read text output, in which a package is named after its tests."""
    waiting: list[tuple[str, Outcome]] = []
    for line in lines:
        if match := _GO_TEST.fullmatch(line):
            waiting.append((match[2], _GO_OUTCOMES[match[1]]))
        elif match := _GO_BROKEN.fullmatch(line.strip()):
            yield match[1], Outcome.ERROR
        elif match := _GO_PACKAGE.fullmatch(line):
            yield from ((f"{match[2]}.{test}", outcome) for test, outcome in waiting)
            waiting = []
    yield from waiting


_JEST_MARKS = {
    "✓": Outcome.PASSED,
    "√": Outcome.PASSED,
    "✕": Outcome.FAILED,
    "×": Outcome.FAILED,
    "○": Outcome.SKIPPED,
    "✎": Outcome.SKIPPED,
}
_JEST_TEST = re.compile(rf"( +)([{''.join(_JEST_MARKS)}]) (?:skipped |todo )?(.+?)(?: \([\d.]+ m?s\))?")
_JEST_FILE = re.compile(r"(PASS|FAIL) (\S+)(?: \([\d.]+ m?s\))?")
_JEST_DESCRIBE = re.compile(r"( +)(\S.*)")
_JEST_TOTALS = re.compile(r"Tests:\s(.*)(?<=\d) total")
_JEST_COUNT = re.compile(rf"\b({_NUMBER}) (failed|passed|skipped|todo)")
_JEST_BROKEN = re.compile(r"\s*● Test suite failed to run")


def _jest_results(lines: list[str]) -> Results:
    """Read tests listed below their file and indented below their description; details follow."""
    file: str | None = None
    blocks: list[tuple[int, str]] = []
    for line in lines:
        if match := _JEST_FILE.fullmatch(line.rstrip()):
            file, blocks = match[2], []
        elif file is None:
            continue
        elif _JEST_BROKEN.fullmatch(line):
            yield file, Outcome.ERROR
        elif not line.strip() or line.lstrip().startswith("●"):
            file = file if not line.strip() else None
        elif match := _JEST_TEST.fullmatch(line.rstrip()):
            blocks = [block for block in blocks if block[0] < len(match[1])]
            yield " > ".join([*(name for _, name in blocks), match[3]]), _JEST_MARKS[match[2]]
        elif match := _JEST_DESCRIBE.fullmatch(line.rstrip()):
            blocks = [block for block in blocks if block[0] < len(match[1])]
            blocks.append((len(match[1]), match[2]))


def _jest_totals(lines: list[str]) -> Iterator[TestCounts]:
    for line in lines:
        if match := _JEST_TOTALS.fullmatch(line.strip()):
            yield _tally(_JEST_COUNT.findall(match[1]), ("passed",), ("failed",), ("skipped", "todo"))


_CARGO_OUTCOMES = {"ok": Outcome.PASSED, "FAILED": Outcome.FAILED, "ignored": Outcome.SKIPPED}
_CARGO_TEST = re.compile(r"test (.+?)(?: - should panic)? \.\.\. (.*)")
_CARGO_ENDING = re.compile(r"(?:.*?)(ok|FAILED|ignored)(?:, .*)?(?: <[\d.]+s>)?")
_CARGO_BROKEN = re.compile(r"error: could not compile `(.+?)`.*")


def _cargo_results(lines: list[str]) -> Results:
    """Read results; a test that prints without being captured has its outcome on a later line."""
    pending: str | None = None
    for line in lines:
        if match := _CARGO_BROKEN.fullmatch(line):
            yield match[1], Outcome.ERROR
            continue
        ending = line
        if match := _CARGO_TEST.fullmatch(line):
            pending, ending = match[1], match[2]
        if pending and (end := _CARGO_ENDING.fullmatch(ending.strip())):
            yield pending, _CARGO_OUTCOMES[end[1]]
            pending = None


_JUNIT_OUTCOMES = {"failure": Outcome.FAILED, "error": Outcome.ERROR, "skipped": Outcome.SKIPPED}


def _junit_results(text: str) -> Results:
    """Read JUnit XML: `testsuites`, `testsuite` and `testcase` at any depth."""
    # Test reports need no entities, which could make the parser run forever.
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        return
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        return
    for case in root.iter("testcase"):
        if name := ".".join(filter(None, (case.get("classname"), case.get("name")))):
            yield name, Outcome.PASSED
            yield from ((name, _JUNIT_OUTCOMES[child.tag]) for child in case if child.tag in _JUNIT_OUTCOMES)


class ReportFormat(StrEnum):
    """The format of a test report."""

    PYTEST = "pytest"
    """`pytest -rA` or `-v` names every test; without them only failures are named and the rest counted."""
    UNITTEST = "unittest"
    """`python -m unittest -v` names every test; without `-v` only failures are named."""
    GO = "go"
    """`go test -v` or `go test -json`."""
    JEST = "jest"
    """`jest --verbose` names every test; without it tests are only counted."""
    CARGO = "cargo"
    """`cargo test`."""
    JUNIT = "junit"
    """A JUnit XML file, which most runners of most languages can write."""


def _no_summaries(_lines: list[str]) -> Iterator[TestCounts]:
    return iter(())


_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_READERS: dict[
    ReportFormat, tuple[Callable[[list[str]], Results], Callable[[list[str]], Iterator[TestCounts]]]
] = {
    ReportFormat.PYTEST: (_pytest_results, _pytest_closings),
    ReportFormat.UNITTEST: (_unittest_results, _unittest_summaries),
    ReportFormat.GO: (_go_results, _no_summaries),
    ReportFormat.JEST: (_jest_results, _jest_totals),
    ReportFormat.CARGO: (_cargo_results, _no_summaries),
}


def parse_report(format: ReportFormat, text: str) -> TestReport:
    """Parse a report, ignoring what is not understood; never raises."""
    if format is ReportFormat.JUNIT:
        return make_report(_junit_results(text))
    lines = _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    results, summaries = _READERS[format]
    return make_report(results(lines), summaries(lines))
