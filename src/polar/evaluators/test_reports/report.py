"""What came of the tests of one run, in no runner's words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How one test ended, from best to worst."""

    PASSED = "passed"
    """Also a test that was expected to fail and did."""
    SKIPPED = "skipped"
    FAILED = "failed"
    """Also a test that was expected to fail and did not."""
    ERROR = "error"
    """The test could not be run: its set-up failed, its file does not load, its package does not build."""

    @property
    def is_bad(self) -> bool:
        return self in (Outcome.FAILED, Outcome.ERROR)


_RANK = {outcome: rank for rank, outcome in enumerate(Outcome)}


@dataclass(frozen=True, slots=True)
class Counts:
    """What the runner's own summary says."""

    passed: int = 0
    failed: int = 0
    """Errors included."""
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


@dataclass(frozen=True, slots=True)
class TestReport:
    """The tests a report names, and how many there were of each kind."""

    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """By the test's id. A test that is reported twice has the worse outcome."""
    counts: Counts = Counts()
    """At least those of `outcomes`; more where the runner only counts the tests that passed."""

    __test__ = False

    @property
    def is_empty(self) -> bool:
        return not self.outcomes and self.counts == Counts()

    @property
    def has_failures(self) -> bool:
        return self.counts.failed > 0


def make_report(results: Iterable[tuple[str, Outcome]], summary: Counts | None = None) -> TestReport:
    """The report of these results; of contradictions it believes the worse."""
    outcomes: dict[str, Outcome] = {}
    for name, outcome in results:
        known = outcomes.get(name)
        outcomes[name] = outcome if known is None else max(known, outcome, key=_RANK.__getitem__)
    named = Counts(
        passed=sum(outcome is Outcome.PASSED for outcome in outcomes.values()),
        failed=sum(outcome.is_bad for outcome in outcomes.values()),
        skipped=sum(outcome is Outcome.SKIPPED for outcome in outcomes.values()),
    )
    if summary is None:
        return TestReport(outcomes, named)
    counts = Counts(
        passed=max(named.passed, summary.passed),
        failed=max(named.failed, summary.failed),
        skipped=max(named.skipped, summary.skipped),
    )
    return TestReport(outcomes, counts)


def worst(summaries: Iterable[Counts]) -> Counts | None:
    """The summary to believe where code under test may have printed another one."""
    return max(summaries, key=lambda counts: (counts.failed, -counts.passed), default=None)


NUMBER = r"[0-9]{1,9}"
"""A count, in parsers' patterns: no runner counts further, and Python reads no int of thousands of digits."""

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def lines_of(text: str) -> list[str]:
    """The lines of a runner's output without colours."""
    return _ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
