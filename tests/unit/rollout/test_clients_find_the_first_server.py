"""Of several servers in one data directory the first stays the one that clients find."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.app.stack import serving
from polar.client.connection import server_address
from polar.config.settings import ServerSettings, Settings


async def test_a_server_that_comes_and_goes_leaves_the_others_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POLAR_SERVER", raising=False)
    settings = Settings(data_dir=tmp_path / ".polar", server=ServerSettings(port=0))
    async with serving(settings, lambda _step: None) as first:
        async with serving(settings, lambda _step: None):
            assert server_address(None) == first.url
        assert server_address(None) == first.url
    async with serving(settings, lambda _step: None) as next_one:
        assert server_address(None) == next_one.url
    assert not (tmp_path / ".polar/server.json").exists()
