"""The output of `go test -v` and of `go test -json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from polar.evaluators.test_reports.report import Outcome, TestReport, lines_of, make_report

_OUTCOMES = {"PASS": Outcome.PASSED, "FAIL": Outcome.FAILED, "SKIP": Outcome.SKIPPED}
_TEST = re.compile(r"\s*--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)")
_PACKAGE = re.compile(r"(ok|FAIL|---|\?)\s+(\S+)\s+(?:[\d.]+s|\(cached\)|\[.*\]).*")
_BROKEN = re.compile(r"FAIL\s+(\S+) \[(build|setup) failed\]")


def parse(text: str) -> TestReport:
    """Both kinds of lines count: code under test may print some of either."""
    lines = lines_of(text)
    events = [event for line in lines if (event := _event(line))]
    return make_report([*_from_events(events), *_from_text(lines)])


def _event(line: str) -> dict[str, str] | None:
    if not line.startswith("{"):
        return None
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or "Action" not in document:
        return None
    return {name: value for name, value in document.items() if isinstance(value, str)}


def _from_events(events: list[dict[str, str]]) -> Iterator[tuple[str, Outcome]]:
    named = {(event.get("Package"), event.get("Test")) for event in events if event.get("Test")}
    with_tests = {package for package, _ in named}
    for event in events:
        outcome = _OUTCOMES.get(event.get("Action", "").upper())
        package, test = event.get("Package"), event.get("Test")
        if outcome is None:
            continue
        if test:
            yield f"{package}.{test}", outcome
        elif outcome is Outcome.FAILED and package not in with_tests:
            yield str(package), Outcome.ERROR


def _from_text(lines: list[str]) -> Iterator[tuple[str, Outcome]]:
    """A package is named after its tests."""
    waiting: list[tuple[str, Outcome]] = []
    for line in lines:
        if match := _TEST.fullmatch(line):
            waiting.append((match[2], _OUTCOMES[match[1]]))
        elif match := _BROKEN.fullmatch(line.strip()):
            yield match[1], Outcome.ERROR
        elif match := _PACKAGE.fullmatch(line):
            yield from ((f"{match[2]}.{test}", outcome) for test, outcome in waiting)
            waiting = []
    yield from waiting
