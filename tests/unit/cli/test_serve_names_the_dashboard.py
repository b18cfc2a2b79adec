"""`polar serve` names the dashboard's address, and its token only to a person at a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("is_terminal", "said"),
    [(True, r"http://127\.0\.0\.1:\d+/#token=polar_\w+"), (False, r"http://127\.0\.0\.1:\d+/")],
    ids=["terminal", "file"],
)
def test_token_is_shown_to_a_terminal_only(is_terminal: bool, said: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty() if is_terminal else os.pipe()
    command = [
        sys.executable,
        "-m",
        "polar",
        "serve",
        "--no-node",
        "--port",
        "0",
        "--data-dir",
        str(tmp_path),
    ]
    with subprocess.Popen(command, stdout=theirs) as serving, open(ours) as output:
        os.close(theirs)
        told = next(line for line in output if line.startswith("dashboard: "))
        serving.terminate()
    assert re.fullmatch(f"dashboard: {said}\n", told)
