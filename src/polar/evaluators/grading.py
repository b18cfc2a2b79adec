"""A test report and what was expected of it → a reward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from polar.evaluators.test_reports.report import Outcome, TestReport
from polar.models.component import Frozen

NAMED_FAILURES = 20
"""How many tests that did not pass a report names."""


class TestReward(StrEnum):
    """How outcomes become one number."""

    __test__ = False

    ALL_PASS = "all_pass"
    """1.0 if every test that counts passed, else 0.0."""
    FRACTION = "fraction"
    """The share of the tests that count which passed."""


class Expected(Frozen):
    """The tests that count, by the ids that the report gives them."""

    fail_to_pass: tuple[str, ...] = ()
    """What the change must bring about."""
    pass_to_pass: tuple[str, ...] = ()
    """What it must not break; being skipped is no harm to these."""

    def __bool__(self) -> bool:
        return bool(self.fail_to_pass or self.pass_to_pass)


@dataclass(frozen=True, slots=True)
class Grade:
    reward: float
    components: Mapping[str, float]
    remarks: tuple[str, ...]
    """What a person wants to know of it, a line each."""


def grade(report: TestReport, exit_code: int, expected: Expected | None, reward: TestReward) -> Grade:
    """Score a run of tests. A runner that fails without naming a failure is not believed."""
    if report.is_empty:
        return Grade(0.0, {}, ("no test result was recognised in the output",))
    if exit_code != 0 and not report.has_failures:
        remark = f"the report shows no failure but the runner ended with exit code {exit_code}"
        return Grade(0.0, _counts(report), (remark,))
    if expected:
        return _grade_expected(report, expected, reward)
    counts = report.counts
    bad = [name for name, outcome in report.outcomes.items() if outcome.is_bad]
    is_clean = counts.passed > 0 and counts.failed == 0 and exit_code == 0
    share = counts.passed / max(1, counts.passed + counts.failed)
    value = share if reward is TestReward.FRACTION else float(is_clean)
    return Grade(value, _counts(report), _named("did not pass", bad))


def _grade_expected(report: TestReport, expected: Expected, reward: TestReward) -> Grade:
    fixed = _split(report, expected.fail_to_pass, {Outcome.PASSED})
    kept = _split(report, expected.pass_to_pass, {Outcome.PASSED, Outcome.SKIPPED})
    passed, total = len(fixed[0]) + len(kept[0]), len(expected.fail_to_pass) + len(expected.pass_to_pass)
    value = passed / total if reward is TestReward.FRACTION else float(passed == total)
    components = _counts(report)
    if expected.fail_to_pass:
        components["fail_to_pass"] = len(fixed[0]) / len(expected.fail_to_pass)
    if expected.pass_to_pass:
        components["pass_to_pass"] = len(kept[0]) / len(expected.pass_to_pass)
    remarks = (*_named("should pass now, but does not", fixed[1]), *_named("no longer passes", kept[1]))
    return Grade(value, components, remarks)


def _split(report: TestReport, names: Iterable[str], good: set[Outcome]) -> tuple[list[str], list[str]]:
    """Those with a good outcome, and the others; a test that is not in the report is among these."""
    parts: tuple[list[str], list[str]] = ([], [])
    for name in names:
        parts[_outcome(report, name) not in good].append(name)
    return parts


def _outcome(report: TestReport, name: str) -> Outcome | None:
    """Published lists hold ids that are cut off inside their parameters; those stand for all they begin."""
    if name in report.outcomes or name.count("[") <= name.count("]"):
        return report.outcomes.get(name)
    matches = {outcome for test, outcome in report.outcomes.items() if test.startswith(name)}
    return matches.pop() if len(matches) == 1 else None


def _counts(report: TestReport) -> dict[str, float]:
    counts = report.counts
    return {
        "tests_passed": float(counts.passed),
        "tests_failed": float(counts.failed),
        "tests_skipped": float(counts.skipped),
    }


def _named(what: str, names: list[str]) -> tuple[str, ...]:
    shown = tuple(f"{what}: {name}" for name in names[:NAMED_FAILURES])
    return (*shown, f"and {len(names) - NAMED_FAILURES} more") if len(names) > NAMED_FAILURES else shown
