"""Sdists are fetched from the index that pip is set up for, also from one that asks for a password."""

from __future__ import annotations

import hashlib
import io
import tarfile
from base64 import b64encode
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from polar_public_tasks.index import Sdist, sdist_directory

from polar.assets.cache import DownloadFailed
from tests.fakes.http_pages import http_pages

PASSWORD = "pa:s@s"


def archive() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as sdist:
        member = tarfile.TarInfo("thing-1.0/thing.py")
        member.size = 2
        sdist.addfile(member, io.BytesIO(b"1\n"))
    return made.getvalue()


ARCHIVE = archive()
THING = Sdist("thing", "1.0", hashlib.sha256(ARCHIVE).hexdigest())


def pages(path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    """An index with one sdist, for those who know the password."""
    if headers.get("Authorization") != f"Basic {b64encode(f'me:{PASSWORD}'.encode()).decode()}":
        return 401, b""
    page = b'<a href="../files/thing-1.0.tar.gz#sha256=0">thing-1.0.tar.gz</a>'
    return 200, page if path == "/thing/" else ARCHIVE


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    with http_pages(pages) as port:
        yield f"127.0.0.1:{port}"


def test_a_password_of_pips_settings_is_sent(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:pa%3As%40s@{index}")
    assert (sdist_directory(THING) / "thing.py").read_text() == "1\n"


def test_a_password_that_is_refused_is_not_shown(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@{index}/")
    with pytest.raises(DownloadFailed, match="401") as refused:
        sdist_directory(THING)
    assert "secret" not in str(refused.value)
