"""A store on each kind of database, with a clock that stands still."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polar.store.store import Store
from tests.databases import KINDS, empty_postgres, fresh_postgres
from tests.fakes.control_plane import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
def database_url(request: pytest.FixtureRequest) -> str | None:
    """Of a migrated database; None: SQLite, in the data directory."""
    return fresh_postgres() if request.param == "postgres" else None


@pytest.fixture(params=KINDS)
def empty_place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Where a database can be made."""
    return empty_postgres() if request.param == "postgres" else tmp_path / "polar.db"


@pytest.fixture
async def store(tmp_path: Path, clock: Clock, database_url: str | None) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "data", clock, database_url=database_url) as opened:
        yield opened
