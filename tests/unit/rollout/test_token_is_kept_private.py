"""The control plane's token: made once, whoever asks first, and readable by its owner only."""

from __future__ import annotations

import logging
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar.app.stack import serving
from polar.config.settings import ServerSettings, Settings, WebhookSettings
from polar.errors import InvalidInput, PolarError
from polar.rollout.access import load_or_create_token
from polar.store.store import Store


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_token_is_made_once_with_mode_600(tmp_path: Path) -> None:
    token = load_or_create_token(tmp_path / "data")
    assert len(token) >= 32
    assert load_or_create_token(tmp_path / "data") == token
    assert mode(tmp_path / "data" / "token") == 0o600
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"token", "token.lock"}


def test_all_who_ask_at_once_get_the_same_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        tokens = set(pool.map(load_or_create_token, [tmp_path] * 64))
    assert len(tokens) == 1


def test_file_open_to_others_is_closed_without_showing_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token = load_or_create_token(tmp_path)
    (tmp_path / "token").chmod(0o644)
    with caplog.at_level(logging.DEBUG):
        assert load_or_create_token(tmp_path) == token
    assert mode(tmp_path / "token") == 0o600
    assert "could be read by others" in caplog.text
    assert token not in caplog.text


async def test_the_database_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    async with Store.open(tmp_path):
        files = {path.name: mode(path) for path in tmp_path.glob("polar.db*")}
    assert set(files.values()) == {0o600}
    assert len(files) >= 2


async def test_what_webhooks_are_signed_with_is_made_once_and_kept_private(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "server": {"port": 0, "webhooks": {"allow": ["hooks.example:443"]}}}
    )
    secrets = set()
    for _ in range(2):
        async with serving(settings, lambda _step: None):
            secrets.add((tmp_path / "webhook-secret").read_text())
    assert len(secrets) == 1
    assert mode(tmp_path / "webhook-secret") == 0o600
    shared = ServerSettings(
        database_url="postgresql://nowhere/polar", webhooks=WebhookSettings(allow=("hooks.example:443",))
    )
    with pytest.raises(InvalidInput, match="must use the same secret"):
        async with serving(Settings(data_dir=tmp_path, server=shared), lambda _step: None):
            pass


def test_file_without_a_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").touch(0o600)
    with pytest.raises(PolarError, match="does not hold a token"):
        load_or_create_token(tmp_path)


def test_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(PolarError, match="token cannot be used"):
        load_or_create_token(tmp_path / "data")
