"""Draws the learning curves of runs, one per seed, from their metrics, and writes a table.

    python examples/grpo-pi/curve.py runs/grpo-pi/metrics.jsonl … --out docs/results/learning

writes learning.svg and learning.md. If held-out.jsonl (NAME.held-out.jsonl for NAME.jsonl) is beside the
metrics, it adds confidence intervals of the gain. Needs only Python.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean

WIDTH, HEIGHT, LEFT, BOTTOM, MARGIN = 760, 380, 56, 44, 20
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed")
SMOOTHED = 5
"""Number of steps over which training rewards are averaged, since each has only a few tasks."""
CONFIDENT = 1.96
"""Standard errors on either side of a 95 % interval."""

Points = Sequence[tuple[int, float]]
Gains = Mapping[str, float]
"""The gain in the pass rate of each held-out task."""


@dataclass(frozen=True)
class Run:
    """The data of one run's curve."""

    name: str
    held_out: Points
    reward: Points
    gains: Gains
    """Empty if unknown."""

    @property
    def before(self) -> float:
        return self.held_out[0][1]

    @property
    def after(self) -> float:
        return self.held_out[-1][1]


def read(path: Path) -> Run:
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]

    def column(name: str) -> Points:
        return [(line["step"], line[name]) for line in lines if name in line]

    name = path.parent.name if path.name == "metrics.jsonl" else path.stem
    held_out = column("held_out_success")
    return Run(name, held_out, _smooth(column("reward")), _gains(path, [step for step, _ in held_out]))


def _gains(metrics: Path, steps: Sequence[int]) -> Gains:
    is_run = metrics.name == "metrics.jsonl"
    path = metrics.with_name("held-out.jsonl") if is_run else metrics.with_suffix(".held-out.jsonl")
    if not path.is_file() or not steps:
        return {}
    # A killed run may have measured a step twice; it continued with the weights of the later one.
    measured = {line["step"]: line["passed"] for line in map(json.loads, path.read_text().splitlines())}
    first, last = measured[steps[0]], measured[steps[-1]]
    return {task: last[task] - first[task] for task in first if task in last}


def _smooth(points: Points) -> Points:
    values = [value for _, value in points]
    return [
        (step, fmean(values[max(0, place - SMOOTHED + 1) : place + 1]))
        for place, (step, _) in enumerate(points)
    ]


def svg(runs: Sequence[Run]) -> str:
    last = max([step for run in runs for step, _ in (*run.held_out, *run.reward)], default=1) or 1

    def at(step: float, share: float) -> str:
        x = LEFT + step / last * (WIDTH - LEFT - MARGIN)
        y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - MARGIN)
        return f"{x:.1f},{y:.1f}"

    def line(points: Points, style: str) -> str:
        return f'<polyline fill="none" points="{" ".join(at(*point) for point in points)}" {style}/>'

    parts = [_axes(at, last)]
    for run, colour in zip(runs, COLOURS, strict=False):
        parts.append(line(run.reward, f'stroke="{colour}" stroke-opacity="0.35" stroke-width="1.5"'))
        parts.append(line(run.held_out, f'stroke="{colour}" stroke-width="2.5"'))
        for point in run.held_out:
            x, y = at(*point).split(",")
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colour}"/>')
    for place, (run, colour) in enumerate(zip(runs, COLOURS, strict=False)):
        line_at = HEIGHT - BOTTOM - 14 - 18 * place
        parts.append(
            f'<text x="{WIDTH - MARGIN}" y="{line_at}" text-anchor="end" fill="{colour}">{run.name}: '
            f"{run.before:.0%} → {run.after:.0%}</text>"
        )
    style = 'font-family="system-ui, sans-serif" font-size="13"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _axes(at: Callable[[float, float], str], last: int) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        (x, y), right = at(0, share).split(","), at(last, share).split(",")[0]
        parts.append(f'<line x1="{x}" x2="{right}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{float(y) + 4}" text-anchor="end">{share:.0%}</text>')
    for step in _ticks(last):
        x = at(step, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    middle = (LEFT + WIDTH - MARGIN) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step; thick: held-out success,'
        " thin: reward of the tasks trained on</text>"
    )
    return "".join(parts)


def _ticks(last: int) -> Iterable[int]:
    every = next((size for size in (1, 5, 10, 20, 50, 100) if last / size <= 10), 500)
    return range(0, last + 1, every)


def table(runs: Sequence[Run]) -> str:
    rows = [
        f"| {run.name} | {run.before:.1%} | {run.after:.1%} | {_points(run.after - run.before, run.gains)}"
        f" | {max(value for _, value in run.held_out):.1%} | {run.held_out[-1][0]} |"
        for run in runs
    ]
    if len(runs) > 1:
        before, after = fmean(run.before for run in runs), fmean(run.after for run in runs)
        known = [run.gains for run in runs if run.gains]
        tasks = set(known[0]).intersection(*known) if len(known) == len(runs) else set()
        gains = {task: fmean(one[task] for one in known) for task in tasks}
        rows.append(f"| mean | {before:.1%} | {after:.1%} | {_points(after - before, gains)} | | |")
    head = "| run | held-out before | after | points | best | steps |\n|---|---|---|---|---|---|"
    return "\n".join([head, *rows]) + "\n"


def _points(gain: float, gains: Gains) -> str:
    """Format the gain with its 95 % interval: paired by task, and clustered by kind of task."""
    said = f"{100 * gain:+.1f}"
    mean = fmean(gains.values()) if gains else 0.0
    kinds: dict[str, float] = defaultdict(float)
    for task, value in gains.items():
        kinds[_kind(task)] += value - mean
    if len(kinds) < 2:
        return said
    variance = sum(value * value for value in kinds.values()) * len(kinds) / (len(kinds) - 1)
    return f"{said} ± {100 * CONFIDENT * sqrt(variance) / len(gains):.1f}"


def _kind(task: str) -> str:
    """Return `sort-lines` for `sort-lines-held-out-2`."""
    return re.sub(r"(-held-out)?-\d+$", "", task)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("metrics", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path("learning"), help="path without suffix")
    asked = parser.parse_args()
    runs = [run for run in map(read, asked.metrics) if run.held_out]
    if not runs:
        raise SystemExit("error: no run has held-out numbers")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.with_suffix(".svg").write_text(svg(runs))
    asked.out.with_suffix(".md").write_text(table(runs))
    print(table(runs), end="")


if __name__ == "__main__":
    main()
