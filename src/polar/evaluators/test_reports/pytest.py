"""The output of pytest: `-rA` summary lines, `-v` progress lines, and the closing counts."""

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
    "PASSED": Outcome.PASSED,
    "XFAIL": Outcome.PASSED,
    "SKIPPED": Outcome.SKIPPED,
    "FAILED": Outcome.FAILED,
    "XPASS": Outcome.PASSED,
    "ERROR": Outcome.ERROR,
}
_WORDS = "|".join(_OUTCOMES)
_SUMMARY = re.compile(rf"({_WORDS}) (\S.*)")
_FILE = re.compile(r"\S+?\.py::.")
_OUTCOME = re.compile(rf" ({_WORDS})(?= \(|$)")
_PERCENT = re.compile(r"\[\s*\d+%\]")
_CLOSING = re.compile(
    rf"(?:=+ )?((?:{NUMBER} [a-z]+, )*{NUMBER} [a-z]+) in [\d.]+s(?: \([\d:, a-z]+\))?(?: =+)?"
)
_COUNT = re.compile(rf"({NUMBER}) ([a-z]+)")


def parse(text: str) -> TestReport:
    lines = lines_of(text)
    return make_report(_results(lines), worst(_closings(lines)))


def _results(lines: list[str]) -> Iterator[tuple[str, Outcome]]:
    for line in lines:
        if progress := _progress(line):
            yield progress
        elif match := _SUMMARY.fullmatch(line):
            name = _test_id(match[2])
            # "SKIPPED [2] file:3: why" names no test, and log records begin with the same words.
            if "::" in name or (match[1] == "ERROR" and name.endswith(".py")):
                yield name, _OUTCOMES[match[1]]


def _progress(line: str) -> tuple[str, Outcome] | None:
    """`id OUTCOME`, then perhaps `(reason)` and `[ 50%]`; looked at once, however long it is."""
    file = _FILE.match(line)
    if file is None:
        return None
    line = line.rstrip()
    head, bracket, rest = line.rpartition("[")
    if _PERCENT.fullmatch(bracket + rest) and head[-1:].isspace():
        line = head.rstrip()
    for match in _OUTCOME.finditer(line, file.end()):
        if match.end() == len(line) or line.endswith(")"):
            return line[: match.start()], _OUTCOMES[match[1]]
    return None


def _test_id(text: str) -> str:
    """The id in `id - reason`; the parameters of an id may hold the separator themselves."""
    head, separator, _ = text.partition(" - ")
    if not separator or head.count("[") <= head.count("]"):
        return head.strip()
    end = text.find("]")
    return text[: end + 1] if end >= 0 else text.strip()


def _closings(lines: list[str]) -> Iterator[Counts]:
    for line in lines:
        if match := _CLOSING.fullmatch(line.strip()):
            found = {kind: int(number) for number, kind in _COUNT.findall(match[1])}
            yield Counts(
                passed=found.get("passed", 0) + found.get("xfailed", 0) + found.get("xpassed", 0),
                failed=found.get("failed", 0) + found.get("error", 0) + found.get("errors", 0),
                skipped=found.get("skipped", 0),
            )
