"""How to run the tests of a task and what they are worth; run where the agent's work lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from pydantic import Field, model_validator

from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.environment import run_grader
from polar.evaluators.grading import Expected, Grade, TestReward, grade
from polar.evaluators.inside import UngradableWorkspace, place, run_script
from polar.evaluators.output import cut, report_of, text_of
from polar.evaluators.steering import rivals
from polar.evaluators.tampering import Finding, Tampered, tampering_remarks
from polar.evaluators.test_reports import PARSERS, ReportFormat
from polar.evaluators.test_reports.report import TestReport
from polar.evaluators.workspace import GradedWorkspace, Guarded
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath
from polar.runtimes.base import ExecResult, Sandbox, SandboxError

REPORT_FILE_BYTES = 16 * 1024 * 1024
NOT_RUNNABLE = (126, 127)
"""What a shell ends with that cannot run its command."""


class TestPlan(Guarded):
    """The options that `tests` and `diff` share."""

    __test__ = False

    command: str | list[str] = Field(min_length=1)
    """A string is run by `/bin/sh -c`, a list as it is; in the workspace."""
    format: ReportFormat
    report: WorkspacePath | None = None
    """The file the command writes its report to; None: what it prints. Required for `junit`."""
    files: dict[WorkspacePath, FileContent] = Field(default_factory=dict)
    """Hidden tests: put in place only now, over whatever the agent left there."""
    expected: Expected | None = None
    """The tests that count; None: all there are."""
    reward: TestReward = TestReward.ALL_PASS

    @property
    def guarded(self) -> tuple[str, ...]:
        """Patterns of the files whose change is tampering besides `protect`: the hidden tests' places."""
        return tuple(pattern for path in self.files for pattern in rivals(path))

    @model_validator(mode="after")
    def _has_report(self) -> TestPlan:
        if self.format is ReportFormat.JUNIT and self.report is None:
            raise ValueError("format 'junit' needs 'report', the path of the XML file")
        return self


async def run_plan(plan: TestPlan, context: EvaluationContext, work: GradedWorkspace) -> Verdict:
    """Put the hidden tests in place, run them and grade what they report."""
    sandbox, findings = work.sandbox, work.findings
    await place(sandbox, plan.files)
    await _clear_report(plan, sandbox, timeout=context.seconds_left)
    limit = plan.limit(context)
    result = await run_grader(plan.command, sandbox, env=plan.env, timeout=limit)
    if result.timed_out:
        return verdict_of(Grade(0.0, {}, (f"the tests did not end within {limit:g} s",)), findings, result)
    if result.exit_code in NOT_RUNNABLE:
        await _blame(plan, context)
    report = await _report(plan, sandbox, result)
    return verdict_of(grade(report, result.exit_code, plan.expected, plan.reward), findings, result)


async def _clear_report(plan: TestPlan, sandbox: Sandbox, *, timeout: float) -> None:
    """Only what the tests themselves write is a report of them, not what lies in its place before."""
    if plan.report is None:
        return
    result = await run_script(
        sandbox, 'rm -rf -- "$1"', f"./{plan.report}", timeout=timeout, name="evaluator-clear"
    )
    if result.exit_code != 0:
        raise UngradableWorkspace(f"what lies in the place of the report {plan.report} cannot be removed")


async def _blame(plan: TestPlan, context: EvaluationContext) -> None:
    """EvaluationFailed if the command cannot be run in an untouched sandbox either."""
    async with context.fresh_sandbox() as fresh:
        await place(fresh, plan.files)
        result = await run_grader(plan.command, fresh, env=plan.env, timeout=context.seconds_left)
        if result.exit_code in NOT_RUNNABLE:
            raise EvaluationFailed(
                f"the test command cannot be run in this sandbox: {report_of(result)[-2000:]}",
                hint="is its program installed there?",
            )


async def _report(plan: TestPlan, sandbox: Sandbox, result: ExecResult) -> TestReport:
    parse = PARSERS[plan.format]
    if plan.report is None:
        return parse(text_of(result))
    try:
        path = sandbox.workspace / PurePosixPath(plan.report)
        data = await sandbox.download(path, max_bytes=REPORT_FILE_BYTES)
    except SandboxError:
        return TestReport()
    return parse(data.decode(errors="replace"))


def verdict_of(graded: Grade, findings: Sequence[Finding], result: ExecResult | None = None) -> Verdict:
    """The verdict with everything a person wants to know first."""
    remarks = [*graded.remarks, *tampering_remarks(findings)]
    output = [report_of(result)] if result else []
    return Verdict(
        reward=graded.reward,
        components={**graded.components, "tampering": float(len(findings))},
        report=cut("\n".join([*remarks, *output])),
    )


def spoiled(error: UngradableWorkspace) -> Verdict:
    """The verdict of an agent that left nothing that can be evaluated, or what must not be."""
    findings = error.findings if isinstance(error, Tampered) else ()
    return verdict_of(Grade(0.0, {}, (error.message,)), findings)
