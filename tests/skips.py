"""What a run may skip: in CI only what the hardware lacks, and a suite asked for by name never everything."""

from __future__ import annotations

import os
from typing import Any

import pytest

HARDWARE = (
    "conformance of docker is NOT TESTED here",
    "conformance of podman is NOT TESTED here",
    "conformance of apptainer is NOT TESTED here",
    "NOT TESTED: the numbers are those of x86_64",
    "no other kernel ends a child with its parent",
    "no browser is packaged for this platform",
)
"""How the reasons begin for which a test may be skipped where CI runs."""


def fail_unwanted_skips(session: pytest.Session) -> None:
    """In CI, fail a run that skipped what the machine could have tested."""
    unwanted = [reason for reason in _reasons(session) if not reason.startswith(HARDWARE)]
    if os.environ.get("CI") and unwanted:
        _fail(session, "skipped in CI, though not for want of hardware", unwanted)


def fail_if_nothing_ran(session: pytest.Session) -> None:
    """Fail a suite whose tests were all skipped."""
    ran = any(_reports(session, outcome) for outcome in ("passed", "failed", "error"))
    if not ran and (reasons := _reasons(session)):
        _fail(session, "this suite tested nothing", reasons)


def _fail(session: pytest.Session, what: str, reasons: list[str]) -> None:
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    for reason in reasons:
        reporter.write_line(f"\nerror: {what}: {reason}", red=True)


def _reasons(session: pytest.Session) -> list[str]:
    """Each reason once."""
    texts = [str(report.longrepr[2]) for report in _reports(session, "skipped")]
    return list(dict.fromkeys(text.removeprefix("Skipped: ") for text in texts))


def _reports(session: pytest.Session, outcome: str) -> list[Any]:
    """Those of all workers; a worker itself has no reporter, and knows of none."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    return reporter.stats.get(outcome, []) if reporter is not None else []
