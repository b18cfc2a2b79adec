"""`polar verify` prints a line for each recording and all together, and exits with 1 if one does not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polar.cli.main import app
from tests.fakes.recordings import encoded, recording


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("s1", "s2"):
        path = tmp_path / "recordings" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(recording(name)))
    return tmp_path


def verified(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", "--no-replay", *map(str, arguments)])


def test_sound_recordings_pass(folder: Path) -> None:
    result = verified(folder)
    assert result.exit_code == 0, result.output
    header, *lines = result.stdout.splitlines()
    assert header.split()[:5] == ["SESSION", "TRACES", "SAMPLED", "TRAINED", "COMPARED"]
    assert [line.split()[0] for line in lines[:2]] == [
        str(folder / "recordings" / name) for name in ("s1", "s2")
    ]
    assert lines[2].startswith("2 sessions")
    assert all(line.endswith("ok") for line in lines)


def test_one_recording_needs_no_total(folder: Path) -> None:
    result = verified(folder / "recordings" / "s1")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 2


def test_a_damaged_recording_fails_and_the_others_are_still_told(folder: Path) -> None:
    path = folder / "recordings" / "s1"
    path.write_bytes(path.read_bytes()[:60])
    result = verified(folder, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    first, second = document["sessions"]
    assert (first["passed"], second["passed"], document["total"]["passed"]) == (False, True, False)
    assert "damaged" in first["failure"]
    assert str(path) in document["total"]["failure"]
    assert second["delta_logprob"] == {"max": None, "mean": None, "tokens": 0, "worst": None}


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    result = verified(tmp_path / "nowhere")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "no such file or directory" in result.stderr
