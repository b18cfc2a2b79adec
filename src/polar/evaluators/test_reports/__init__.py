"""What a test runner printed → which tests passed; one small pure parser a format."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from polar.evaluators.test_reports import cargo, go, jest, junit, pytest, unittest
from polar.evaluators.test_reports.report import TestReport


class ReportFormat(StrEnum):
    """Whose words a test report is in."""

    PYTEST = "pytest"
    """`pytest -rA` or `-v` names every test; without them only failures have names, the rest is counted."""
    UNITTEST = "unittest"
    """`python -m unittest -v` names every test; without `-v` only failures have names."""
    GO = "go"
    """`go test -v` or `go test -json`."""
    JEST = "jest"
    """`jest --verbose` names every test; without it tests are only counted."""
    CARGO = "cargo"
    """`cargo test`."""
    JUNIT = "junit"
    """A JUnit XML file, as most runners of most languages can write."""


PARSERS: dict[ReportFormat, Callable[[str], TestReport]] = {
    ReportFormat.PYTEST: pytest.parse,
    ReportFormat.UNITTEST: unittest.parse,
    ReportFormat.GO: go.parse,
    ReportFormat.JEST: jest.parse,
    ReportFormat.CARGO: cargo.parse,
    ReportFormat.JUNIT: junit.parse,
}
"""Total functions: what they do not understand they leave out, and never raise."""
