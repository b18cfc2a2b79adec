"""The output of pytest: `-rA` summary lines, `-v` progress lines, and the closing counts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from polar.evaluators.test_reports.report import Counts, Outcome, TestReport, lines_of, make_report, worst

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
_PROGRESS = re.compile(rf"(\S+\.py::.+?) ({_WORDS})(?: \(.*\))?(?:\s+\[\s*\d+%\])?\s*")
_CLOSING = re.compile(r"(?:=+ )?((?:\d+ [a-z]+, )*\d+ [a-z]+) in [\d.]+s(?: \([\d:, a-z]+\))?(?: =+)?")
_COUNT = re.compile(r"(\d+) ([a-z]+)")


def parse(text: str) -> TestReport:
    lines = lines_of(text)
    return make_report(_results(lines), worst(_closings(lines)))


def _results(lines: list[str]) -> Iterator[tuple[str, Outcome]]:
    for line in lines:
        if match := _PROGRESS.fullmatch(line):
            yield match[1], _OUTCOMES[match[2]]
        elif match := _SUMMARY.fullmatch(line):
            name = _test_id(match[2])
            # "SKIPPED [2] file:3: why" names no test, and log records begin with the same words.
            if "::" in name or (match[1] == "ERROR" and name.endswith(".py")):
                yield name, _OUTCOMES[match[1]]


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
