"""Scores the agent's patch on a SWE-bench row, with the official package's specifications and log parsers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from polar.errors import NotInstalled
from polar.evaluators.base import EvaluationContext, EvaluationFailed
from polar.evaluators.diff import PatchOptions, apply_patch, grade_patch, touched_files
from polar.evaluators.inside import ANY_PLUGIN, place_file, private_directory, run_grader, text_of
from polar.evaluators.tampering import literal, rivals
from polar.evaluators.test_reports import Outcome, ReportFormat, TestReport, make_report, parse_report
from polar.evaluators.tests import Expected, TestReward, grade, out_of_time
from polar.evaluators.workspace import GradedWorkspace, WorkspaceEvaluator
from polar.models.session import Verdict
from polar.models.task import FileContent, WorkspacePath


def _parse_test_ids(value: Any) -> Any:
    """Accept test ids as a list or as JSON text, since datasets have both."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except ValueError:
        raise ValueError("must be a list of test ids, as a list or as JSON text") from None


def _file(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


def _patch(value: str) -> str:
    if value.strip() and "\n+++ " not in f"\n{value}" and "GIT binary patch" not in value:
        raise ValueError("must be a unified diff")
    return value


TestIds = Annotated[tuple[str, ...], BeforeValidator(_parse_test_ids)]
Diff = Annotated[str, AfterValidator(_patch)]


class SweRow(BaseModel):
    """The columns of a row that grading a patch needs; others are ignored."""

    model_config = {"extra": "ignore", "frozen": True, "populate_by_name": True}

    instance_id: str = Field(min_length=1)
    """The name of the row."""
    repo: str = Field(min_length=1)
    """`owner/name` of the repository."""
    base_commit: str = ""
    """The commit that the agent starts from."""
    version: str = ""
    """The repository's version, by which the official package knows how to run its tests."""
    test_patch: Diff = ""
    """The hidden tests, as a patch to the base commit."""
    fail_to_pass: TestIds = Field(alias="FAIL_TO_PASS")
    """Tests that fail before the repair and must pass after it."""
    pass_to_pass: TestIds = Field(default=(), alias="PASS_TO_PASS")
    """Tests that must still pass."""
    problem_statement: str = ""
    """The issue to resolve."""
    patch: Diff = ""
    """The gold patch, which no evaluator reads."""
    files: dict[WorkspacePath, Annotated[FileContent, BeforeValidator(_file)]] = Field(default_factory=dict)
    """The repository at the base commit, if the row carries it; values may be plain text."""

    test_cmd: str | None = None
    """How to run the tests of repositories for which the official package has no specification."""
    log_parser: str | None = None
    """The parser for `test_cmd` or `eval_script`: one of our formats (`pytest`, `unittest`, …) or an
    official parser (`parse_log_pytest`, …)."""
    eval_script: str | None = None
    """The script that runs the tests between the official markers, as newer datasets carry it."""

    @model_validator(mode="after")
    def _can_be_graded(self) -> SweRow:
        if not self.fail_to_pass:
            raise ValueError("FAIL_TO_PASS: must name at least one test")
        if (self.test_cmd or self.eval_script) and not self.log_parser:
            raise ValueError("log_parser: is required with test_cmd and eval_script")
        known = {format.value for format in ReportFormat} - {ReportFormat.JUNIT.value}
        parser = self.log_parser
        if parser and parser not in known and not parser.startswith("parse_log_"):
            raise ValueError(
                f"log_parser: must be one of {', '.join(sorted(known))} or an official parse_log_…"
            )
        return self

    @property
    def expected(self) -> Expected:
        return Expected(fail_to_pass=self.fail_to_pass, pass_to_pass=self.pass_to_pass)


logger = logging.getLogger(__name__)

OfficialParser = Callable[[str, Any], dict[str, str]]
ENVIRONMENT = "testbed"
"""The name, in official images, of the repository's directory and of its environment."""
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_SUITE_RAN = re.compile(
    r"\b[1-9]\d* (passing|passed|SUCCESS|specs?)\b|Executed [1-9]\d* of|^# tests [1-9]|^Tests:\s+[1-9]",
    re.MULTILINE,
)
"""How runners report that tests ran; those that name only failures are silent on success and on a crash."""
_OUTCOMES = {
    "PASSED": Outcome.PASSED,
    "XFAIL": Outcome.SKIPPED,
    "SKIPPED": Outcome.SKIPPED,
    "FAILED": Outcome.FAILED,
    "ERROR": Outcome.ERROR,
}


@dataclass(frozen=True, slots=True)
class Procedure:
    """How the tests of a row are run and their results read."""

    script: str
    """Run by bash in the workspace, after applying the agent's patch."""
    parse: Callable[[str], TestReport]
    applies_test_patch: bool
    """Whether the script applies the hidden tests itself; if not, it exits with their exit code."""


class SwebenchEvaluator(WorkspaceEvaluator):
    class Options(PatchOptions):
        row: SweRow
        reward: TestReward = TestReward.ALL_PASS
        """How outcomes become a reward; `all_pass` is what SWE-bench calls resolved."""

    options: Options

    async def grade(self, context: EvaluationContext) -> Verdict:
        row = self.options.row
        procedure = procedure_of(row)
        # Paths of hidden tests are reserved: the agent's changes there do not count.
        tests = touched_files(row.test_patch.encode())
        return await grade_patch(
            context,
            self.options,
            exclude=(*self.options.exclude, *map(literal, tests)),
            guarded=tuple(rivals(tests)),
            test=lambda patched: self._test(context, patched, procedure),
        )

    async def _test(
        self, context: EvaluationContext, patched: GradedWorkspace, procedure: Procedure
    ) -> Verdict:
        options, fresh = self.options, patched.sandbox
        if not procedure.applies_test_patch:
            tests = options.row.test_patch.encode()
            if problem := await apply_patch(fresh, tests, timeout=context.seconds_left):
                name = options.row.instance_id
                raise EvaluationFailed(f"row.test_patch of {name} does not apply: {problem}")
        script = private_directory(fresh) / "eval.sh"
        await place_file(fresh, script, procedure.script.encode(), executable=True)
        limit = options.limit(context)
        # Markers go to one stream and results to the other, so both are merged.
        command = f"exec /bin/bash {script} 2>&1"
        result = await run_grader(command, fresh, env={**ANY_PLUGIN, **options.env}, timeout=limit)
        if result.timed_out:
            return out_of_time(options, limit, patched, result)
        exit_code = 0 if procedure.applies_test_patch else result.exit_code
        report = procedure.parse(text_of(result))
        return patched.explain(grade(report, exit_code, options.row.expected, options.reward), result)


def procedure_of(row: SweRow) -> Procedure:
    """Return how to grade a row: as it says itself, else as the official package specifies."""
    if row.test_cmd:
        assert row.log_parser
        return Procedure(row.test_cmd, _parser(row.log_parser, row), applies_test_patch=False)
    if row.eval_script:
        assert row.log_parser
        parse = _between_markers(_parser(row.log_parser, row))
        return Procedure(row.eval_script, parse, applies_test_patch=True)
    return _official_procedure(row)


def _official_procedure(row: SweRow) -> Procedure:
    with _require_package():
        from swebench.harness.constants import FAIL_ONLY_REPOS, MAP_REPO_VERSION_TO_SPECS
        from swebench.harness.log_parsers import MAP_REPO_TO_PARSER

        # `make_test_spec` would also plan the image and download files for it.
        from swebench.harness.test_spec.create_scripts import make_eval_script_list
    versions = MAP_REPO_VERSION_TO_SPECS.get(row.repo)
    if versions is None or row.version not in versions:
        known = f"versions {', '.join(sorted(versions))}" if versions else "no version"
        raise EvaluationFailed(
            f"the swebench package has no specification for {row.repo} {row.version!r} (it has {known})",
            hint="add test_cmd and log_parser to the row",
        )
    script = make_eval_script_list(
        row.model_dump(include={"repo", "version", "test_patch", "instance_id"}),
        versions[row.version],
        *(ENVIRONMENT, f"/{ENVIRONMENT}", row.base_commit, row.test_patch),
    )
    parser = MAP_REPO_TO_PARSER[row.repo]
    silent_passes = row.repo in FAIL_ONLY_REPOS
    expected = (*row.fail_to_pass, *row.pass_to_pass)

    def parse(log: str) -> TestReport:
        report = _report(parser, log, row)
        if not silent_passes or (report.is_empty and not _SUITE_RAN.search(log)):
            return report
        # Runners of these repositories name only failures.
        return make_report([*report.outcomes.items(), *((name, Outcome.PASSED) for name in expected)])

    lines = ("#!/bin/bash", "set -uxo pipefail", *script)
    return Procedure("\n".join(lines) + "\n", _between_markers(parse), applies_test_patch=True)


def _between_markers(parse: Callable[[str], TestReport]) -> Callable[[str], TestReport]:
    """Restrict a parser to the output between the markers; without them, the tests never ran."""

    def parse_part(log: str) -> TestReport:
        _, start, rest = log.partition(START)
        part, end, _ = rest.rpartition(END)
        return parse(part) if start and end else TestReport()

    return parse_part


def _parser(name: str, row: SweRow) -> Callable[[str], TestReport]:
    if name in {format.value for format in ReportFormat}:
        return partial(parse_report, ReportFormat(name))
    with _require_package():
        from swebench.harness import log_parsers
    for language in _LANGUAGES:
        if official := getattr(getattr(log_parsers, language, None), name, None):
            return lambda log: _report(official, log, row)
    raise EvaluationFailed(f"row.log_parser: the swebench package has no {name!r}")


def _report(parser: OfficialParser, log: str, row: SweRow) -> TestReport:
    """Apply an official parser to a log; a log on which it fails counts as empty."""
    try:
        # Parsers read only the instance id of the specification, which the row has too.
        statuses = parser(log, row)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        logger.warning("%s: the official parser failed on the tests' output: %r", row.instance_id, error)
        return TestReport()
    return make_report((name, _OUTCOMES.get(status, Outcome.ERROR)) for name, status in statuses.items())


@contextmanager
def _require_package() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise NotInstalled(
            f"the swebench evaluator requires the swebench package: {error}",
            hint="pip install 'polar-rl[swebench]'",
        ) from None


_LANGUAGES = ("c", "go", "java", "javascript", "php", "python", "ruby", "rust")
