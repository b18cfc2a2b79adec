"""The output of Python's unittest, with or without `-v`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from polar.evaluators.test_reports.report import (
    NUMBER,
    Counts,
    Outcome,
    TestReport,
    lines_of,
    make_report,
    worst,
)

_OUTCOMES = {
    "ok": Outcome.PASSED,
    "expected failure": Outcome.PASSED,
    "FAIL": Outcome.FAILED,
    "unexpected success": Outcome.FAILED,
    "ERROR": Outcome.ERROR,
}
_TEST = re.compile(r"(\w+) \(([\w.<>]+)\)(?: (?:\(.*\)|\[.*\]))?")
_ENDING = re.compile(r"(?:.* \.\.\. |.*?)(ok|expected failure|FAIL|unexpected success|ERROR|skipped(?: .*)?)")
_HEADING = re.compile(r"(FAIL|ERROR|UNEXPECTED SUCCESS): (.+)")
_RAN = re.compile(rf"Ran ({NUMBER}) tests? in [\d.]+s")
_RESULT = re.compile(r"(?:OK|FAILED|NO TESTS RAN)(?: \((.*)\))?")


def parse(text: str) -> TestReport:
    lines = lines_of(text)
    return make_report(_results(lines), worst(_summaries(lines)))


def _results(lines: list[str]) -> Iterator[tuple[str, Outcome]]:
    """Verbose lines are `name (where) ... ok`; a docstring or something printed may stand between."""
    pending: str | None = None
    for line in lines:
        if match := _HEADING.fullmatch(line):
            pending = None
            if test := _TEST.match(match[2]):
                yield _test_id(test), Outcome.ERROR if match[1] == "ERROR" else Outcome.FAILED
            continue
        start, dots, rest = line.partition(" ... ")
        if test := _TEST.fullmatch(start):
            pending = _test_id(test)
            ending = rest.strip() if dots else ""
        else:
            ending = line.strip() if not dots else line
        if pending and (outcome := _outcome(ending)):
            yield pending, outcome
            pending = None


def _outcome(ending: str) -> Outcome | None:
    match = _ENDING.fullmatch(ending)
    if match is None:
        return None
    return Outcome.SKIPPED if match[1].startswith("skipped") else _OUTCOMES[match[1]]


def _test_id(test: re.Match[str]) -> str:
    """`module.Class.method`: since Python 3.11 the parentheses hold it all, before they lacked the method."""
    method, where = test[1], test[2]
    return where if where.endswith(f".{method}") else f"{where}.{method}"


def _summaries(lines: list[str]) -> Iterator[Counts]:
    ran: int | None = None
    for line in lines:
        if match := _RAN.fullmatch(line):
            ran = int(match[1])
        elif ran is not None and (match := _RESULT.fullmatch(line)):
            found = {
                kind.strip(): int(number)
                for kind, _, number in (part.partition("=") for part in (match[1] or "").split(","))
                if re.fullmatch(NUMBER, number)
            }
            failed = sum(found.get(kind, 0) for kind in ("failures", "errors", "unexpected successes"))
            skipped = found.get("skipped", 0)
            yield Counts(passed=max(0, ran - failed - skipped), failed=failed, skipped=skipped)
            ran = None
