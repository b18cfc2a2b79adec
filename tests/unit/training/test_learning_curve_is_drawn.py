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


def test_tasks_of_one_kind_count_as_one_where_they_rise_together(tmp_path: Path) -> None:
    metrics(tmp_path / "one.jsonl", [0.0, 0.5])
    before = dict.fromkeys(("sort-held-out-1", "sort-held-out-2", "copy-held-out-1", "copy-held-out-2"), 0.0)
    after = {task: 1.0 if task.startswith("sort") else 0.0 for task in before}
    lines = ({"step": 0, "passed": before}, {"step": 10, "passed": after})
    (tmp_path / "one.held-out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = drawn(tmp_path / "one.jsonl", "--out", tmp_path / "curve")
    # Two kinds, one of which was learnt: not four tasks, two of which were.
    assert "| one | 0.0% | 50.0% | +50.0 ± 98.0 | 50.0% | 10 |" in done.stdout


def test_the_published_gains_are_those_of_the_published_numbers(tmp_path: Path) -> None:
    results = SCRIPT.parents[2] / "docs" / "results"
    seeds = [results / "learning" / f"seed-{seed}.jsonl" for seed in range(3)]
    mean = drawn(*seeds, "--out", tmp_path / "curve").stdout.splitlines()[-1]
    points = mean.split("|")[4].strip()
    assert points == "+21.1 ± 8.8"
    for page in (results / "learning.md", results.parents[1] / "README.md"):
        assert points in page.read_text()


def test_the_gain_comes_with_its_interval_over_tasks_where_they_are_known(tmp_path: Path) -> None:
    for name, after in (("one", [1.0, 0.5, 0.5, 0.0]), ("two", [0.5, 0.5, 0.0, 0.0])):
        metrics(tmp_path / f"{name}.jsonl", [0.25, sum(after) / 4])
        before = {"step": 0, "passed": {"a": 0.5, "b": 0.5, "c": 0.0, "d": 0.0}}
        # Measured twice: of a step that was made again the last line counts.
        broken = {"step": 10, "passed": {"a": 0.0}}
        last = {"step": 10, "passed": dict(zip("abcd", after, strict=True))}
        lines = "".join(json.dumps(line) + "\n" for line in (before, broken, last))
        (tmp_path / f"{name}.held-out.jsonl").write_text(lines)
    done = drawn(tmp_path / "one.jsonl", tmp_path / "two.jsonl", "--out", tmp_path / "curve")
    assert done.returncode == 0, done.stderr
    # Gains of the tasks: 0.5, 0, 0.5, 0, with a standard deviation of 0.289.
    assert "| one | 25.0% | 50.0% | +25.0 ± 28.3 | 50.0% | 10 |" in done.stdout
    assert "| two | 25.0% | 25.0% | +0.0 ± 0.0 | 25.0% | 10 |" in done.stdout
    assert "| mean | 25.0% | 37.5% | +12.5 ± 14.1 | | |" in done.stdout
