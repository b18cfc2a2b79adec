"""One YAML file becomes frozen settings; what it must not say is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.config.settings import load_settings
from polar.errors import InvalidInput


@pytest.mark.parametrize("below", ["", "data"])
def test_a_file_is_no_data_directory(tmp_path: Path, below: str) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    with pytest.raises(InvalidInput, match="taken is a file, not a directory"):
        load_settings(overrides={"data_dir": file / below})


def test_the_file_is_read_and_overrides_win(tmp_path: Path) -> None:
    file = tmp_path / "polar.yaml"
    file.write_text("server: {port: 9000}\nnode: {run_slots: 3}\n")
    settings = load_settings(file, {"server": {"port": 0, "host": None}})
    assert (settings.server.port, settings.server.host, settings.node.run_slots) == (0, "127.0.0.1", 3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sever: {}", "sever: unknown key"),
        ("server: {port: 70000}", "server.port"),
        ("server: {token: short}", "server.token"),
        ("engine: {url: localhost}", "engine.url: must be a URL that begins with http:// or https://$"),
        ("node: {server: localhost}", "node.server: must be a URL that begins with http://"),
        ("- a list", "mapping"),
        ("a: b: c", "polar.yaml:1:5: not YAML"),
        ("node: {}\nnode: {}", "2:1: not YAML: the key 'node' is given twice"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "polar.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=said):
        load_settings(file)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "polar.yaml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match=r"polar.yaml: not UTF-8 text \(byte 0\)"):
        load_settings(file)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_settings(tmp_path / "none.yaml")
