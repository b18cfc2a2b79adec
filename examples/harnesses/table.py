"""Prints an experiment's table: every arm on the held-out tasks, and its gain over the first.

python examples/harnesses/table.py runs/harnesses
python examples/harnesses/table.py docs/results/harnesses
"""

from __future__ import annotations

import sys
from pathlib import Path

from polar.evals.comparison import PairedCells, compare
from polar.evals.report import Cell, load_report
from polar.evals.statistics import Estimate

BEFORE, PILOT = "before", "pilot"
"""The arm that gains are relative to, and one on other tasks, which is left out."""


def main() -> None:
    root = Path(sys.argv[1])
    reports = {
        path.relative_to(root).parts[:2]: load_report(path)
        for path in sorted(root.rglob("report.json"))
        if not path.relative_to(root).parts[1].startswith(PILOT)
    }
    most = f"pass@{min((max(report.ks) for report in reports.values()), default=1)}"
    columns = ("trained through", "arm", "tested through", "pass@1", most, "gain", "calls", "tokens")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for (trained, arm), report in sorted(reports.items(), key=lambda item: item[1].created_at):
        before = reports.get((trained, BEFORE)) if arm != BEFORE else None
        gains = compare(before, report).cells if before is not None else [None] * len(report.cells)
        for cell, gain in zip(report.cells, gains, strict=True):
            print(f"| {trained} | {arm} | {_row(cell, most, gain)} |")


def _row(cell: Cell, most: str, gain: PairedCells | None) -> str:
    each = (cell.cost.completions / cell.cost.sessions, cell.cost.sampled_tokens / cell.cost.sessions)
    shown = [_percent(cell.metrics[name]) for name in ("pass@1", most)]
    found = _percent(gain.pass_difference, "+") if gain is not None else ""
    return " | ".join([cell.harness, *shown, found, f"{each[0]:.1f}", f"{each[1]:.0f}"])


def _percent(one: Estimate, sign: str = "") -> str:
    return f"{100 * one.value:{sign}.1f} % [{100 * one.low:{sign}.1f}, {100 * one.high:{sign}.1f}]"


if __name__ == "__main__":
    main()
