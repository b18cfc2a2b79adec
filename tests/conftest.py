"""What every test needs."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, settings

from tests.sandboxes import require_runtime

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sandbox"):
        asyncio.run(require_runtime("bubblewrap"))
