"""The files that an evaluation leaves: JSON for programs, Markdown and HTML for people, plots beside them.

An HTML file needs nothing else: no scripts, no fonts, no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path

from polar.evals.comparison import Comparison
from polar.evals.grids import Grid, comparison_grids, facts, report_grids, task_grids
from polar.evals.plots import TITLES, comparison_plot, plots
from polar.evals.report import REPORT_FILE, Report
from polar.files import write_atomic

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#])")
"""What means something in Markdown."""
LONGEST_NAME = 36
"""Longer texts are folded in their cell, others stay on one line."""

_STYLE = """
:root { color-scheme: light dark;
  --ink: #1c2024; --soft: #60646c; --rule: #e1e3e8; --page: #fff; --card: #f7f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #eceef0; --soft: #a3a8b0; --rule: #31353c; --page: #121417; --card: #1a1d21; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem;
  background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { color: var(--soft); margin: .25rem 0; }
.plots { display: grid; gap: 1rem; margin-top: 1.5rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; }
figcaption { font-size: .85rem; color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--rule);
  text-align: left; vertical-align: top; }
th { font-weight: 600; color: var(--soft); } th, td { white-space: nowrap; }
.long { white-space: normal; min-width: 12rem; } .number { text-align: right; }
summary { cursor: pointer; } summary h2 { display: inline-block; }
"""


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


def report_markdown(report: Report, comparison: Comparison | None, plots: Iterable[str]) -> str:
    """The whole report; `plots` are the names of the drawings in `plots/`."""
    grids = [
        *report_grids(report),
        *(comparison_grids(comparison) if comparison else ()),
        *task_grids(report),
    ]
    parts = [
        "# Evaluation",
        _escaped(facts(report)),
        _markdown(grids[0]),
        *(f"![{TITLES[name]}](plots/{name}.svg)" for name in plots),
        *map(_markdown, grids[1:]),
    ]
    return "\n\n".join(parts) + "\n"


def comparison_markdown(comparison: Comparison) -> str:
    return "\n\n".join(["# Comparison", *map(_markdown, comparison_grids(comparison))]) + "\n"


def _markdown(grid: Grid) -> str:
    rule = ["---" if at < grid.words else "---:" for at in range(len(grid.columns))]
    rows = [[_escaped(cell) for cell in row] for row in (grid.columns, *grid.rows)]
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:])]
    note = ["", _escaped(grid.note)] if grid.note else []
    return "\n".join([f"## {_escaped(grid.title)}", "", *lines, *note])


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", text)


def report_html(report: Report, comparison: Comparison | None, plots: Mapping[str, str]) -> str:
    """The whole report; `plots` are the drawings by name."""
    results, *others = report_grids(report)
    body = [
        f"<h1>Evaluation</h1><p>{escape(facts(report))}</p>",
        _section(results),
        _figures(plots),
        *map(_section, others),
        *(_compared(comparison) if comparison else ()),
        *(_folded(grid) for grid in task_grids(report)),
    ]
    return _page(f"Evaluation {report.run}", body)


def comparison_html(comparison: Comparison, plots: Mapping[str, str]) -> str:
    differences, *changes = _compared(comparison)
    body = ["<h1>Comparison</h1>", differences, _figures(plots), *changes]
    return _page(f"{comparison.before} and {comparison.after}", body)


def _compared(comparison: Comparison) -> Iterator[str]:
    """The differences in sight, the tasks behind them folded."""
    differences, *changes = comparison_grids(comparison)
    yield _section(differences)
    yield from map(_folded, changes)


def _page(title: str, body: Iterable[str]) -> str:
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _figures(plots: Mapping[str, str]) -> str:
    figures = (
        f"<figure><figcaption>{escape(TITLES[name])}</figcaption>{drawing}</figure>"
        for name, drawing in plots.items()
    )
    return f'<div class="plots">{"".join(figures)}</div>'


def _section(grid: Grid) -> str:
    return f"<section><h2>{escape(grid.title)}</h2>{_table(grid)}</section>"


def _folded(grid: Grid) -> str:
    return f"<details><summary><h2>{escape(grid.title)}</h2></summary>{_table(grid)}</details>"


def _table(grid: Grid) -> str:
    head = "".join(_cell("th", at, text, grid) for at, text in enumerate(grid.columns))
    rows = (
        f"<tr>{''.join(_cell('td', at, text, grid) for at, text in enumerate(row))}</tr>" for row in grid.rows
    )
    note = f"<p>{escape(grid.note)}</p>" if grid.note else ""
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
        + note
    )


def _cell(tag: str, at: int, text: str, grid: Grid) -> str:
    kind = ' class="number"' if at >= grid.words else ' class="long"' if len(text) > LONGEST_NAME else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
