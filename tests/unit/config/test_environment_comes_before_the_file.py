"""What an environment variable says comes before what the settings file says."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.config.settings import ServerSettings, Settings
from polar.errors import PolarError
from polar.stack import serving


async def test_the_database_of_the_environment_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLAR_DATABASE_URL", "mysql://environment/polar")
    settings = Settings(data_dir=tmp_path, server=ServerSettings(port=0, database_url="oracle://file/polar"))
    with pytest.raises(PolarError, match="'mysql' is not supported"):
        async with serving(settings, lambda _step: None):
            pass
