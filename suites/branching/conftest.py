"""Where the harnesses run: in bubblewrap, and in containers of every engine that starts here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from suites.containers.conftest import IMAGE
from suites.containers.conftest import image_archive as image_archive  # a fixture
from suites.containers.conftest import nothing_stays_mounted as nothing_stays_mounted
from suites.engines import PROGRAMS, running
from tests.sandboxes import require_runtime


@dataclass(frozen=True)
class Room:
    """A runtime, as a task names it."""

    name: str
    options: dict[str, Any]

    @property
    def component(self) -> dict[str, Any]:
        return {"name": self.name, "options": self.options}


@pytest.fixture(scope="session", params=PROGRAMS)
def container(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    archive = request.getfixturevalue("image_archive")
    with running(request.param, archive, IMAGE, tmp_path_factory.mktemp(request.param)) as engine:
        yield Room(engine.name, dict(engine.options))


@pytest.fixture
async def bubblewrap() -> Room:
    await require_runtime("bubblewrap")
    return Room("bubblewrap", {})
