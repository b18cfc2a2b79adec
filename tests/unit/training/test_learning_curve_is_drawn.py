"""The learning curve: held-out success before and after, of every run, as a table and a picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = Path(__file__).parents[3] / "examples" / "grpo-pi" / "curve.py"
SVG = "{http://www.w3.org/2000/svg}"


def metrics(path: Path, success: list[float]) -> Path:
    lines = [{"step": 10 * place, "held_out_success": value} for place, value in enumerate(success)]
    lines += [{"step": step, "reward": 0.5} for step in range(1, 10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drawn(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


def test_every_run_has_its_line_and_its_row(tmp_path: Path) -> None:
    runs = [metrics(tmp_path / "one.jsonl", [0.4, 0.7, 0.6]), metrics(tmp_path / "two.jsonl", [0.5, 0.5])]
    done = drawn(*runs, "--out", tmp_path / "curve")
    assert done.returncode == 0, done.stderr
    assert "| one | 40.0% | 60.0% | +20.0 | 70.0% | 20 |" in done.stdout
    assert (tmp_path / "curve.md").read_text() == done.stdout
    picture = ElementTree.parse(tmp_path / "curve.svg").getroot()
    assert len(picture.findall(f"{SVG}polyline")) == 4
    assert len(picture.findall(f"{SVG}circle")) == 5


def test_runs_without_held_out_numbers_are_refused(tmp_path: Path) -> None:
    done = drawn(metrics(tmp_path / "none.jsonl", []), "--out", tmp_path / "curve")
    assert (done.returncode, done.stderr) == (1, "error: no run has held-out numbers\n")
