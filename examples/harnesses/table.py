"""The table of an experiment: every arm on the held-out tasks, and what it gained, task by task.

python examples/harnesses/table.py runs/harnesses
python examples/harnesses/table.py docs/results/harnesses
"""

from __future__ import annotations

import sys
from pathlib import Path

from polar.evals.comparison import compare
from polar.evals.report import Report, load_report

BEFORE = "before"


def main() -> None:
    root = Path(sys.argv[1])
    reports = {
        path.relative_to(root).parts[:2]: load_report(path) for path in sorted(root.rglob("report.json"))
    }
    most = f"pass@{min((max(report.ks) for report in reports.values()), default=1)}"
    print(f"| harness | arm | pass@1 | {most} | gain in pass@1, paired by task | calls | sampled tokens |")
    print("|---|---|---|---|---|---|---|")
    for (harness, arm), report in sorted(reports.items(), key=lambda item: item[1].created_at):
        before = reports.get((harness, BEFORE))
        print(_row(harness, arm, report, before if arm != BEFORE else None, most))


def _row(harness: str, arm: str, report: Report, before: Report | None, most: str) -> str:
    cell = report.cells[0]
    shown = [
        f"{100 * one.value:.1f} % [{100 * one.low:.1f}, {100 * one.high:.1f}]"
        for one in (cell.metrics["pass@1"], cell.metrics[most])
    ]
    gain = ""
    if before is not None:
        found = compare(before, report).cells[0].pass_difference
        gain = f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    each = (cell.cost.completions / cell.cost.sessions, cell.cost.sampled_tokens / cell.cost.sessions)
    return f"| {harness} | {arm} | {shown[0]} | {shown[1]} | {gain} | {each[0]:.1f} | {each[1]:.0f} |"


if __name__ == "__main__":
    main()
