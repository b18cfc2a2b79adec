"""A row of SWE-bench, SWE-bench Verified, SWE-Gym or their like, as their datasets publish it."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, model_validator

from polar.evaluators.grading import Expected
from polar.evaluators.test_reports import ReportFormat
from polar.models.task import FileContent, WorkspacePath


def _listed(value: Any) -> Any:
    """Datasets hold lists of test ids as lists or as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except ValueError:
        raise ValueError("must be a list of test ids, or one as JSON text") from None


def _file(value: Any) -> Any:
    return {"text": value} if isinstance(value, str) else value


def _patch(value: str) -> str:
    if value.strip() and "\n+++ " not in f"\n{value}" and "GIT binary patch" not in value:
        raise ValueError("must be a unified diff")
    return value


TestIds = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Diff = Annotated[str, AfterValidator(_patch)]


class SweRow(BaseModel):
    """What is needed of a row to grade a patch; other columns are ignored."""

    model_config = {"extra": "ignore", "frozen": True, "populate_by_name": True}

    instance_id: str = Field(min_length=1)
    """The name of the row."""
    repo: str = Field(min_length=1)
    """`owner/name` of the repository."""
    base_commit: str = ""
    """The commit that the agent begins with."""
    version: str = ""
    """Of the repository, by which the official package knows how to run its tests."""
    test_patch: Diff = ""
    """The hidden tests, as a patch to the base commit."""
    fail_to_pass: TestIds = Field(alias="FAIL_TO_PASS")
    """Tests that fail before the repair and must pass after it."""
    pass_to_pass: TestIds = Field(default=(), alias="PASS_TO_PASS")
    """Tests that must still pass."""
    problem_statement: str = ""
    """The issue that is to be resolved."""
    patch: Diff = ""
    """The gold patch; no evaluator reads it."""
    files: dict[WorkspacePath, Annotated[FileContent, BeforeValidator(_file)]] = Field(default_factory=dict)
    """The repository at the base commit, where a row carries it itself; values may be plain text."""

    test_cmd: str | None = None
    """How to run the tests, for repositories that the official package has no specification of."""
    log_parser: str | None = None
    """With `test_cmd` or `eval_script`: a format of ours (`pytest`, `unittest`, …) or the name of an official
    parser (`parse_log_pytest`, …)."""
    eval_script: str | None = None
    """The script that runs the tests between the official markers, as newer datasets carry it."""

    @model_validator(mode="after")
    def _can_be_graded(self) -> SweRow:
        if not self.fail_to_pass:
            raise ValueError("FAIL_TO_PASS: must name at least one test")
        if (self.test_cmd or self.eval_script) and not self.log_parser:
            raise ValueError("log_parser: is needed with test_cmd and eval_script")
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
