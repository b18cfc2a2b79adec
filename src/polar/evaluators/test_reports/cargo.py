"""The output of `cargo test`: unit, integration and documentation tests, one binary after another."""

from __future__ import annotations

import re
from collections.abc import Iterator

from polar.evaluators.test_reports.report import Outcome, TestReport, lines_of, make_report

_OUTCOMES = {"ok": Outcome.PASSED, "FAILED": Outcome.FAILED, "ignored": Outcome.SKIPPED}
_TEST = re.compile(r"test (.+?)(?: - should panic)? \.\.\. (.*)")
_ENDING = re.compile(r"(?:.*?)(ok|FAILED|ignored)(?:, .*)?(?: <[\d.]+s>)?")
_BROKEN = re.compile(r"error: could not compile `(.+?)`.*")


def parse(text: str) -> TestReport:
    return make_report(_results(lines_of(text)))


def _results(lines: list[str]) -> Iterator[tuple[str, Outcome]]:
    """A test that prints without being captured has its outcome on a later line."""
    pending: str | None = None
    for line in lines:
        if match := _BROKEN.fullmatch(line):
            yield match[1], Outcome.ERROR
            continue
        ending = line
        if match := _TEST.fullmatch(line):
            pending, ending = match[1], match[2]
        if pending and (end := _ENDING.fullmatch(ending.strip())):
            yield pending, _OUTCOMES[end[1]]
            pending = None
