"""Without being told, a client finds the server and token of the directory it runs in."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polar.client import Client
from polar.client.connection import server_address, server_token
from polar.errors import PolarError, Unavailable


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("POLAR_SERVER", "POLAR_TOKEN", "POLAR_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".polar").mkdir()
    return tmp_path / ".polar"


def test_order_of_places(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_address(None) == "http://127.0.0.1:8700"
    (data_dir / "server.json").write_text(json.dumps({"url": "http://127.0.0.1:1234", "pid": 1}))
    assert server_address(None) == "http://127.0.0.1:1234"
    monkeypatch.setenv("POLAR_SERVER", "http://elsewhere:1/")
    assert server_address(None) == "http://elsewhere:1"
    assert server_address("http://given") == "http://given"

    (data_dir / "token").write_text("from the file\n")
    assert server_token(None) == "from the file"
    monkeypatch.setenv("POLAR_TOKEN", "from the environment")
    assert server_token(None) == "from the environment"
    assert server_token("given") == "given"


def test_configured_data_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "polar.yaml").write_text("data_dir: other\nserver: {port: 9}\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "token").write_text("there")
    assert server_token(None) == "there"
    assert server_address(None) == "http://127.0.0.1:9"


def test_missing_token_says_what_to_do() -> None:
    with pytest.raises(PolarError, match=r"no token for the server.*set POLAR_TOKEN"):
        Client("http://127.0.0.1:1")


def test_address_that_is_none_is_refused() -> None:
    with pytest.raises(PolarError, match="'localhost:8700' is not an address"):
        Client("localhost:8700", "token")


def test_server_file_that_is_broken_says_so(data_dir: Path) -> None:
    (data_dir / "server.json").write_text("{")
    with pytest.raises(PolarError, match=r"server\.json cannot be understood"):
        Client(token="token")


def test_server_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with (
            Client(f"http://127.0.0.1:{port}", "token") as client,
            pytest.raises(
                Unavailable, match=f"the server at http://127.0.0.1:{port} cannot be reached.*polar serve"
            ),
        ):
            client.health()


def test_refused_token_says_where_the_right_one_is(plane: Any) -> None:
    with Client(plane.url, "wrong") as client, pytest.raises(PolarError, match="set POLAR_TOKEN"):
        client.task("a")


@pytest.fixture
def stranger() -> Iterator[str]:
    """Some other web server."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_other_web_server_is_recognised(stranger: str) -> None:
    with Client(stranger, "token") as client, pytest.raises(PolarError, match="not as Polar does"):
        client.health()
