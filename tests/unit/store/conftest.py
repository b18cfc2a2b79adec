"""A store in its own directory, with a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.store.store import Store
from tests.fakes.control_plane import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "data", clock) as opened:
        yield opened
