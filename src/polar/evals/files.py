"""The files that an evaluation leaves: JSON for programs, Markdown and HTML for people, plots beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from polar.evals.comparison import Comparison
from polar.evals.html import comparison_html, report_html
from polar.evals.markdown import comparison_markdown, report_markdown
from polar.evals.plots import comparison_plot, plots
from polar.evals.report import REPORT_FILE, Report
from polar.files import write_atomic


def report_files(report: Report, comparison: Comparison | None = None) -> dict[str, str]:
    """File name → content. The report itself comes last: where it is, all is there."""
    drawn = plots(report, comparison)
    files = {f"plots/{name}.svg": drawing for name, drawing in drawn.items()}
    files["report.md"] = report_markdown(report, comparison, drawn)
    files["report.html"] = report_html(report, comparison, drawn)
    if comparison:
        files["comparison.json"] = comparison.model_dump_json(indent=2)
    return files | {REPORT_FILE: report.model_dump_json(indent=2)}


def comparison_files(comparison: Comparison) -> dict[str, str]:
    drawn = {"comparison": comparison_plot(comparison)}
    return {
        "comparison.md": comparison_markdown(comparison),
        "comparison.html": comparison_html(comparison, drawn),
        "comparison.json": comparison.model_dump_json(indent=2),
    }


def write(files: Mapping[str, str], out: Path) -> None:
    """Put the files in place, each whole."""
    for name, text in files.items():
        write_atomic(out / name, text + "\n" * (not text.endswith("\n")))
