"""What holds for every suite: one that was asked for by name and tested nothing has failed."""

from __future__ import annotations

import pytest

from tests.skips import fail_if_nothing_ran

SLOWEST = 10
"""How many durations are shown: suites take minutes, and one wants to know where."""


def pytest_configure(config: pytest.Config) -> None:
    if config.option.durations is None:
        config.option.durations = SLOWEST


def pytest_sessionfinish(session: pytest.Session) -> None:
    fail_if_nothing_ran(session)
