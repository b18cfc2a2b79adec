"""A node's directory has one node: a second is refused before it starts anything or says that it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.app.stack import running
from polar.config.settings import EngineSettings, ServerSettings, Settings
from polar.errors import PolarError
from polar.node.services import lock_directory, node_directory


async def test_a_second_system_is_refused_before_its_engine_is_asked_for(tmp_path: Path) -> None:
    settings = Settings(
        data_dir=tmp_path, server=ServerSettings(port=0), engine=EngineSettings(url="http://127.0.0.1:1")
    )
    said: list[str] = []
    with (
        lock_directory(node_directory(tmp_path, settings.node.name)),
        pytest.raises(PolarError, match=r"a node called local is running here already .*another --data-dir"),
    ):
        async with running(settings, said.append):
            pass
    assert said == ["starting the rollout server"]


def test_a_directory_is_free_again(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_directory(tmp_path / "n"):
            pass
