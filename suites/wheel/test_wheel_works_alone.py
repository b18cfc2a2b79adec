"""A wheel, installed with pip alone in an empty directory, does what the README promises of a clone."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
import zipfile
from pathlib import Path

import pytest

from suites.wheel.installed import Installed, ended
from tools.wheel import ROOT

pytestmark = pytest.mark.timeout(900)


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    unwanted = {"__pycache__"}
    links = [path for path in source.rglob("*") if path.is_symlink()]
    files = [*source.rglob("polar/**/*"), *(file for link in links for file in link.rglob("*"))]
    wanted = {
        str(path.relative_to(source)) for path in files if path.is_file() and not unwanted & set(path.parts)
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("polar/")}
    assert held == wanted


def test_what_it_asks_for_is_all_it_needs(installed: Installed, tmp_path: Path) -> None:
    assert "No broken requirements" in installed.run(tmp_path, "python", "-m", "pip", "check")
    where = installed.run(tmp_path, "python", "-c", "import polar; print(polar.__file__)")
    assert Path(where.strip()).is_relative_to(installed.bin.parent)


def test_the_quickstart_rolls_out_its_packaged_tasks(installed: Installed, tmp_path: Path) -> None:
    said = installed.run(tmp_path, "polar", "quickstart", "--samples", "1")
    assert "5 ended, 0 failed" in said
    assert "the policy begins with" in said


def test_a_server_runs_and_shows_its_dashboard(installed: Installed, tmp_path: Path) -> None:
    with ended(installed.start(tmp_path, "polar", "serve", "--warm-start", "--port", "0")) as process:
        assert process.stdout is not None
        said = ""
        while not (found := re.search(r"^dashboard: (\S+)$", said, re.MULTILINE)):
            line = process.stdout.readline()
            assert line, said
            said += line
        with urllib.request.urlopen(found[1]) as page:
            assert b"<html" in page.read()
        assert json.loads(installed.run(tmp_path, "polar", "sessions", "--json") or "[]") == []
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode in (0, 130)


def test_training_runs_on_a_packaged_example(installed: Installed, tmp_path: Path) -> None:
    installed.run(tmp_path, "polar", "examples")
    run = tmp_path / "examples" / "grpo-pi" / "tiny.yaml"
    run.write_text(run.read_text().replace("groups: 3", "groups: 1").replace("samples: 4", "samples: 2"))
    said = installed.run(tmp_path, "polar", "train", "examples/grpo-pi/tiny.yaml", "--steps", "1")
    assert "runs/grpo-pi-tiny/checkpoints/step-000001" in said
    assert (tmp_path / "runs" / "grpo-pi-tiny" / "metrics.jsonl").read_text().count("\n") == 1
