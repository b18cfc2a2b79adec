"""The output of jest (and of vitest's verbose reporter in the same marks)."""

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

_MARKS = {
    "✓": Outcome.PASSED,
    "√": Outcome.PASSED,
    "✕": Outcome.FAILED,
    "×": Outcome.FAILED,
    "○": Outcome.SKIPPED,
    "✎": Outcome.SKIPPED,
}
_TEST = re.compile(rf"( +)([{''.join(_MARKS)}]) (?:skipped |todo )?(.+?)(?: \([\d.]+ m?s\))?")
_FILE = re.compile(r"(PASS|FAIL) (\S+)(?: \([\d.]+ m?s\))?")
_DESCRIBE = re.compile(r"( +)(\S.*)")
_TOTALS = re.compile(r"Tests:\s(.*)(?<=\d) total")
_COUNT = re.compile(rf"\b({NUMBER}) (failed|passed|skipped|todo)")
_BROKEN = re.compile(r"\s*● Test suite failed to run")


def parse(text: str) -> TestReport:
    lines = lines_of(text)
    return make_report(_results(lines), worst(_totals(lines)))


def _results(lines: list[str]) -> Iterator[tuple[str, Outcome]]:
    """Tests stand below their file and indented below what describes them; details come after them."""
    file: str | None = None
    blocks: list[tuple[int, str]] = []
    for line in lines:
        if match := _FILE.fullmatch(line.rstrip()):
            file, blocks = match[2], []
        elif file is None:
            continue
        elif _BROKEN.fullmatch(line):
            yield file, Outcome.ERROR
        elif not line.strip() or line.lstrip().startswith("●"):
            file = file if not line.strip() else None
        elif match := _TEST.fullmatch(line.rstrip()):
            blocks = [block for block in blocks if block[0] < len(match[1])]
            yield " > ".join([*(name for _, name in blocks), match[3]]), _MARKS[match[2]]
        elif match := _DESCRIBE.fullmatch(line.rstrip()):
            blocks = [block for block in blocks if block[0] < len(match[1])]
            blocks.append((len(match[1]), match[2]))


def _totals(lines: list[str]) -> Iterator[Counts]:
    for line in lines:
        if match := _TOTALS.fullmatch(line.strip()):
            found = {kind: int(number) for number, kind in _COUNT.findall(match[1])}
            yield Counts(
                passed=found.get("passed", 0),
                failed=found.get("failed", 0),
                skipped=found.get("skipped", 0) + found.get("todo", 0),
            )
