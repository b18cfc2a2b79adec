"""The files of an evaluation: JSON for programs, Markdown and HTML for people, and plots.

The HTML needs nothing else: no scripts, no fonts, no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from polar.evals.comparison import Comparison
from polar.evals.grids import comparison_grids, facts, report_grids, task_grids
from polar.evals.plots import Plot, comparison_plot, plots
from polar.evals.report import REPORT_FILE, Report
from polar.files import write_atomic

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")


def report_files(report: Report, comparison: Comparison | None = None) -> dict[str, str]:
    """Return file names and contents, the report itself last: once it exists, everything does."""
    drawn = plots(report, comparison)
    compared = comparison_grids(comparison) if comparison else ()
    page = {
        "title": f"Evaluation {report.run}",
        "heading": "Evaluation",
        "facts": facts(report),
        "grids": [*report_grids(report), *compared, *task_grids(report)],
    }
    files = {f"plots/{plot.name}.svg": plot.svg for plot in drawn}
    files["report.md"] = _render("page.md", page, linked=drawn)
    files["report.html"] = _render("page.html", page, plots=drawn)
    if comparison:
        files["comparison.json"] = comparison.model_dump_json(indent=2)
    return files | {REPORT_FILE: report.model_dump_json(indent=2)}


def comparison_files(comparison: Comparison) -> dict[str, str]:
    page = {
        "title": f"{comparison.before} and {comparison.after}",
        "heading": "Comparison",
        "facts": None,
        "grids": list(comparison_grids(comparison)),
    }
    return {
        "comparison.md": _render("page.md", page, linked=()),
        "comparison.html": _render("page.html", page, plots=[comparison_plot(comparison)]),
        "comparison.json": comparison.model_dump_json(indent=2),
    }


def write(files: Mapping[str, str], out: Path) -> None:
    for name, text in files.items():
        write_atomic(out / name, text + "\n" * (not text.endswith("\n")))


def _render(template: str, page: Mapping[str, Any], **plots: Iterable[Plot]) -> str:
    return _templates().get_template(template).render(page, **plots)


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("polar.evals"),
        autoescape=select_autoescape(),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["escaped"] = lambda text: _SPECIAL.sub(r"\\\1", text)
    return made
