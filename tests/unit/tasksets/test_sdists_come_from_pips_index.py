"""Sdists are fetched from the index that pip is set up for, also from one that asks for a password."""

from __future__ import annotations

import hashlib
import io
import tarfile
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from polar_public_tasks.index import Sdist, sdist_directory

from polar.assets.cache import DownloadFailed

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


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        wanted = f"Basic {b64encode(f'me:{PASSWORD}'.encode()).decode()}"
        is_known = self.headers["Authorization"] == wanted
        self.send_response(200 if is_known else 401)
        self.end_headers()
        if is_known:
            page = b'<a href="../files/thing-1.0.tar.gz#sha256=0">thing-1.0.tar.gz</a>'
            self.wfile.write(page if self.path == "/thing/" else ARCHIVE)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_password_of_pips_settings_is_sent(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:pa%3As%40s@{index}")
    assert (sdist_directory(THING) / "thing.py").read_text() == "1\n"


def test_a_password_that_is_refused_is_not_shown(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@{index}/")
    with pytest.raises(DownloadFailed, match="401") as refused:
        sdist_directory(THING)
    assert "secret" not in str(refused.value)
