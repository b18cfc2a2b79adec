"""An agent may give its files any name that its file system takes; none costs the session its archive."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from polar.node.artifacts import Artifacts

NAME = b"caf\xe9 \xe2\x82\xac.txt"
"""One byte of it is Latin-1, the rest UTF-8."""


def test_a_name_that_is_no_text_is_spelt_out(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / os.fsdecode(NAME)).write_bytes(b"kept")
    artifacts = Artifacts(1_000, tmp_path / "collected")
    artifacts.add_directory(logs, "logs")
    artifacts.omit(f"files/{os.fsdecode(NAME)}", "too large")
    assert artifacts.write(tmp_path / "archive.zip")
    archive = zipfile.ZipFile(tmp_path / "archive.zip")
    assert archive.read("logs/caf\\xe9 \u20ac.txt") == b"kept"
    assert archive.read("omitted.txt").decode() == "files/caf\\xe9 \u20ac.txt: too large\n"
