"""Scores a session by running tests that the agent never saw."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import PurePosixPath

from pydantic import Field, model_validator

from polar.evaluators.base import EvaluationContext, NoVerdict
from polar.evaluators.inside import (
    UngradableWorkspace,
    place,
    report_of,
    run_grader,
    run_script,
    text_of,
)
from polar.evaluators.tampering import rivals
from polar.evaluators.test_reports import Outcome, ReportFormat, TestReport, parse_report
from polar.evaluators.workspace import (
    GradedWorkspace,
    GradingOptions,
    SandboxOptions,
    WorkspaceEvaluator,
    graded_workspace,
)
from polar.models.component import Frozen
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import ExecResult, Sandbox, SandboxError

NAMED_FAILURES = 20
"""Maximum number of failed tests that a report names."""


class TestReward(StrEnum):
    """How test outcomes become a reward."""

    __test__ = False

    ALL_PASS = "all_pass"
    """1.0 if every relevant test passed, else 0.0."""
    FRACTION = "fraction"
    """The fraction of relevant tests that passed."""


class Expected(Frozen):
    """The tests that count, by the ids that the report gives them."""

    fail_to_pass: tuple[str, ...] = ()
    """Tests that the change must make pass."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that the change must not break; skipping them is no failure."""

    def __bool__(self) -> bool:
        return bool(self.fail_to_pass or self.pass_to_pass)


def grade(report: TestReport, exit_code: int, expected: Expected | None, reward: TestReward) -> Verdict:
    """Score a test run. A runner that fails without naming a failure is not trusted."""
    if report.is_empty:
        return Verdict(reward=0.0, report="the output contains no recognisable test results")
    if exit_code != 0 and not report.has_failures:
        remark = f"the report shows no failure but the runner ended with exit code {exit_code}"
        return Verdict(reward=0.0, components=_counts(report), report=remark)
    if expected:
        return _grade_expected(report, expected, reward)
    counts = report.counts
    bad = [name for name, outcome in report.outcomes.items() if outcome.is_bad]
    is_clean = counts.passed > 0 and counts.failed == 0 and exit_code == 0
    share = counts.passed / max(1, counts.passed + counts.failed)
    value = share if reward is TestReward.FRACTION else float(is_clean)
    return Verdict(reward=value, components=_counts(report), report="\n".join(_failures("did not pass", bad)))


def _grade_expected(report: TestReport, expected: Expected, reward: TestReward) -> Verdict:
    fixed = _split(report, expected.fail_to_pass, {Outcome.PASSED})
    kept = _split(report, expected.pass_to_pass, {Outcome.PASSED, Outcome.SKIPPED})
    passed, total = len(fixed[0]) + len(kept[0]), len(expected.fail_to_pass) + len(expected.pass_to_pass)
    value = passed / total if reward is TestReward.FRACTION else float(passed == total)
    components = _counts(report)
    if expected.fail_to_pass:
        components["fail_to_pass"] = len(fixed[0]) / len(expected.fail_to_pass)
    if expected.pass_to_pass:
        components["pass_to_pass"] = len(kept[0]) / len(expected.pass_to_pass)
    remarks = [*_failures("should pass now, but does not", fixed[1]), *_failures("no longer passes", kept[1])]
    return Verdict(reward=value, components=components, report="\n".join(remarks))


def _split(report: TestReport, names: Iterable[str], good: set[Outcome]) -> tuple[list[str], list[str]]:
    """Separate tests with a good outcome from the others, which include those missing from the report."""
    parts: tuple[list[str], list[str]] = ([], [])
    for name in names:
        parts[_outcome(report, name) not in good].append(name)
    return parts


def _outcome(report: TestReport, name: str) -> Outcome | None:
    """Look up a test; published ids may be cut off inside their parameters, and then match by prefix."""
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


def _failures(what: str, names: list[str]) -> list[str]:
    shown = [f"{what}: {name}" for name in names[:NAMED_FAILURES]]
    return [*shown, f"and {len(names) - NAMED_FAILURES} more"] if len(names) > NAMED_FAILURES else shown


REPORT_FILE_BYTES = 16 * 1024 * 1024
NOT_RUNNABLE = (126, 127)
"""Exit codes of a shell that cannot run its command."""


class TestPlan(GradingOptions):
    """The options that `tests` and `diff` share."""

    __test__ = False

    command: str | list[str] = Field(min_length=1)
    """The command, run in the workspace; a string with `/bin/sh -c`, a list directly."""
    format: ReportFormat
    report: WorkspacePath | None = None
    """The file that the command writes its report to; if unset, its output. Required for `junit`."""
    files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
    """Hidden tests, added after the agent has ended, over whatever it left there."""
    expected: Expected | None = None
    """The tests that count; all if unset."""
    reward: TestReward = TestReward.ALL_PASS

    @property
    def guards(self) -> tuple[str, ...]:
        """Patterns whose change is tampering in addition to `protect`: the paths of hidden tests."""
        return tuple(rivals(self.files))

    @model_validator(mode="after")
    def _has_report(self) -> TestPlan:
        if self.format is ReportFormat.JUNIT and self.report is None:
            raise ValueError("format 'junit' requires 'report', the path of the XML file")
        return self


async def run_plan(plan: TestPlan, context: EvaluationContext, work: GradedWorkspace) -> Verdict:
    sandbox = work.sandbox
    await place(sandbox, plan.files)
    await _clear_report(plan, sandbox, timeout=context.seconds_left)
    limit = plan.limit(context)
    result = await run_grader(plan.command, sandbox, env=plan.env, timeout=limit)
    if result.timed_out:
        return out_of_time(plan, limit, work, result)
    report = await _report(plan, sandbox, result)
    if result.exit_code in NOT_RUNNABLE and report.is_empty:
        raise NoVerdict(
            f"the test command cannot be run in this sandbox: {report_of(result)[-2000:]}",
            hint="check that its program is installed in the sandbox",
        )
    return work.explain(grade(report, result.exit_code, plan.expected, plan.reward), result)


async def _clear_report(plan: TestPlan, sandbox: Sandbox, *, timeout: float) -> None:
    """Remove any file at the report's path, so that only the tests themselves can write it."""
    if plan.report is None:
        return
    result = await run_script(sandbox, "clear", f"./{plan.report}", timeout=timeout)
    if result.exit_code != 0:
        raise UngradableWorkspace(f"the old report {plan.report} cannot be removed")


async def _report(plan: TestPlan, sandbox: Sandbox, result: ExecResult) -> TestReport:
    if plan.report is None:
        return parse_report(plan.format, text_of(result))
    try:
        path = sandbox.workspace / PurePosixPath(plan.report)
        data = await sandbox.download(path, max_bytes=REPORT_FILE_BYTES)
    except SandboxError:
        return TestReport()
    return parse_report(plan.format, data.decode(errors="replace"))


def out_of_time(options: GradingOptions, limit: float, work: GradedWorkspace, result: ExecResult) -> Verdict:
    verdict = Verdict(reward=options.lowest_reward, report=f"the tests timed out after {limit:g} s")
    return work.explain(verdict, result)


class TestsEvaluator(WorkspaceEvaluator):
    __test__ = False

    class Options(TestPlan, SandboxOptions):
        pass

    options: Options

    async def grade(self, context: EvaluationContext) -> Verdict:
        async with graded_workspace(context, self.options, self.options.guards) as prepared:
            return await run_plan(self.options, context, prepared)
