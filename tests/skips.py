"""What a run may skip: in CI only what a machine cannot have; a suite asked for by name never everything.

What was skipped for such a reason is said at the end of every run, under what was wanting.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

EXCUSED = {
    "a container engine": (
        "conformance of docker is NOT TESTED here",
        "conformance of podman is NOT TESTED here",
        "conformance of apptainer is NOT TESTED here",
    ),
    "other hardware": (
        "NOT TESTED: the numbers are those of x86_64",
        "no browser is packaged for this platform",
    ),
    "another kernel": ("no other kernel ends a child with its parent",),
}
"""What a test may be skipped for want of where CI runs, and how its reason then begins."""


def fail_unwanted_skips(session: pytest.Session) -> None:
    """In CI, fail a run that skipped what the machine could have tested."""
    unwanted = [reason for reason in _reasons(_reporter(session)) if _wanting(reason) is None]
    if os.environ.get("CI") and unwanted:
        _fail(session, f"skipped in CI, though not for want of {_listed(EXCUSED)}", unwanted)


def fail_if_nothing_ran(session: pytest.Session) -> None:
    """Fail a suite whose tests were all skipped."""
    reporter = _reporter(session)
    ran = any(_reports(reporter, outcome) for outcome in ("passed", "failed", "error"))
    if not ran and (reasons := _reasons(reporter)):
        _fail(session, "this suite tested nothing", reasons)


def tell_excused_skips(reporter: Any) -> None:
    """Say what this run did not test, and what would have been needed."""
    told = list(_excused(reporter))
    if told:
        reporter.section("not tested in this run", yellow=True, bold=True)
    for wanting, reason in told:
        reporter.write_line(f"for want of {wanting}: {reason}", yellow=True)


def _excused(reporter: Any) -> Iterator[tuple[str, str]]:
    for reason in _reasons(reporter):
        if wanting := _wanting(reason):
            yield wanting, reason


def _wanting(reason: str) -> str | None:
    return next((wanting for wanting, begins in EXCUSED.items() if reason.startswith(begins)), None)


def _listed(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


def _fail(session: pytest.Session, what: str, reasons: list[str]) -> None:
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = _reporter(session)
    assert reporter is not None
    for reason in reasons:
        reporter.write_line(f"\nerror: {what}: {reason}", red=True)


def _reporter(session: pytest.Session) -> Any:
    """A worker has none, and knows of no reports."""
    return session.config.pluginmanager.get_plugin("terminalreporter")


def _reasons(reporter: Any) -> list[str]:
    """Each reason once."""
    texts = [str(report.longrepr[2]) for report in _reports(reporter, "skipped")]
    return list(dict.fromkeys(text.removeprefix("Skipped: ") for text in texts))


def _reports(reporter: Any, outcome: str) -> list[Any]:
    """Those of all workers."""
    return reporter.stats.get(outcome, []) if reporter is not None else []
