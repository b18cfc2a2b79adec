"""What every test needs."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from polar.runtimes.disk import unmount_below
from tests.sandboxes import require_runtime
from tests.skips import fail_unwanted_skips, tell_excused_skips

pytest.register_assert_rewrite("tests.conformance")
settings.register_profile(
    "random",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=False,  # Hypothesis itself would, where CI is set.
)
settings.register_profile("repeatable", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays_mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A node that a test killed has not unmounted its sandboxes' disks, and is not started again to do so."""
    yield
    unmount_below(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def _log_levels_stay() -> Iterator[None]:
    """A command sets the level of its process, which here is that of the tests after it, too."""
    log = logging.getLogger("polar")
    level = log.level
    yield
    log.setLevel(level)


def pytest_sessionstart() -> None:
    # A shell has what it starts in the background ignore Ctrl-C, and what that starts, too: tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sandbox"):
        asyncio.run(require_runtime("bubblewrap"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    fail_unwanted_skips(session)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    tell_excused_skips(terminalreporter)
