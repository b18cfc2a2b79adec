"""A report's plots as SVG: drawn for a narrow screen, in the reader's own light or dark, without scripts."""

from __future__ import annotations

from html import escape

from polar.evals.comparison import Comparison
from polar.evals.grids import differs, printable
from polar.evals.report import Cell, Report
from polar.evals.statistics import Estimate

WIDTH = 360
"""Of the drawing in its own units: a phone shows them one to one."""
LEFT, RIGHT = 44, 348
"""Where axes begin and end."""
LINE = 18
MAX_SQUARES = 600
"""More tasks than this are not told apart by eye; the table has them all."""
MAX_REASONS = 6
LONGEST_LABEL = 52

STYLE = """
.polar-plot { font: 11px system-ui, sans-serif; width: 100%; max-width: 36rem; height: auto;
  --ink: #1c2024; --soft: #60646c; --rule: #d5d8de; --one: #2f5fd0; --two: #c4620a; --three: #1b8a5a; }
@media (prefers-color-scheme: dark) { .polar-plot {
  --ink: #eceef0; --soft: #a3a8b0; --rule: #3b4048; --one: #86a8ff; --two: #ffab66; --three: #5fd3a0; } }
.polar-plot text { fill: var(--ink); } .polar-plot .soft { fill: var(--soft); font-size: 10px; }
.polar-plot .rule { stroke: var(--rule); } .polar-plot .whisker { stroke: var(--one); stroke-width: 2; }
.polar-plot .one { fill: var(--one); } .polar-plot .two { fill: var(--two); }
.polar-plot .three { fill: var(--three); }
.polar-plot .empty { fill: var(--rule); } .polar-plot .zero { stroke: var(--soft); stroke-dasharray: 3 3; }
"""


class _Drawing:
    """Elements from the top down; `y` is where the next one goes."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []
        self.y = 4.0

    def down(self, by: float) -> float:
        self.y += by
        return self.y

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        words = printable(words)
        if len(words) > LONGEST_LABEL:
            words = f"{words[: LONGEST_LABEL - 1]}…"
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def bar(
        self, x: float, y: float, width: float, height: float, kind: str, *, opacity: float = 1, tip: str = ""
    ) -> None:
        inside = f"<title>{escape(printable(tip))}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" rx="2"'
            f' class="{kind}" fill-opacity="{opacity:.2f}">{inside}</rect>'
        )

    def dot(self, x: float, y: float, kind: str, tip: str) -> None:
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="{kind}">'
            f"<title>{escape(printable(tip))}</title></circle>"
        )

    def svg(self) -> str:
        height = self.y + 6
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="polar-plot" viewBox="0 0 {WIDTH} {height:.0f}"'
            f' role="img" aria-label="{escape(self._title)}">'
            f"<style>{STYLE}</style>{''.join(self._parts)}</svg>"
        )


def plots(report: Report, comparison: Comparison | None = None) -> dict[str, str]:
    """File name → drawing, in the order they are shown; what has nothing to show is left out."""
    drawn = {
        "pass-at-k": pass_plot(report),
        "tasks": tasks_plot(report),
        "cost": cost_plot(report),
        "failures": failures_plot(report),
        "comparison": comparison_plot(comparison) if comparison else None,
    }
    return {name: drawing for name, drawing in drawn.items() if drawing}


TITLES = {
    "pass-at-k": "pass@k with 95 % confidence intervals",
    "tasks": "Each task a square, hardest first: the fuller, the more samples passed",
    "cost": "Tokens per session: prompt, of it cached, sampled",
    "failures": "Why sessions did not pass",
    "comparison": "Difference of pass@1, after − before",
}


def pass_plot(report: Report) -> str:
    """A row for every cell and k: the estimate and how far it may be off."""
    drawing = _Drawing(TITLES["pass-at-k"])
    for cell in report.cells:
        drawing.text(0, drawing.down(LINE + 4), _name(cell, report))
        for k in report.ks:
            if estimate := cell.metrics.get(f"pass@{k}"):
                _interval(drawing, f"k = {k}", estimate, 0.0, 1.0)
    _axis(drawing, 0.0, 1.0)
    return drawing.svg()


def comparison_plot(comparison: Comparison) -> str:
    drawing = _Drawing(TITLES["comparison"])
    reach = max(
        max(abs(cells.pass_difference.low), abs(cells.pass_difference.high)) for cells in comparison.cells
    )
    reach = next(end for end in (0.1, 0.2, 0.4, 0.6, 1.0) if end >= reach)
    middle = (LEFT + RIGHT) / 2
    for cells in comparison.cells:
        label = cells.before if cells.before == cells.after else f"{cells.before} → {cells.after}"
        drawing.text(0, drawing.down(LINE + 4), label)
        _interval(drawing, "", cells.pass_difference, -reach, reach)
        drawing.line(middle, drawing.y - 7, middle, drawing.y + 7, "zero")
    _axis(drawing, -reach, reach)
    return drawing.svg()


def _interval(drawing: _Drawing, label: str, estimate: Estimate, low: float, high: float) -> None:
    y = drawing.down(LINE - 2)
    drawing.text(LEFT - 8, y + 4, label, "soft", "end")
    drawing.line(LEFT, y, RIGHT, y, "rule")
    tip = f"{estimate.value:.3f}, one task, which says nothing of others"
    if estimate.has_interval:
        drawing.line(_place(estimate.low, low, high), y, _place(estimate.high, low, high), y, "whisker")
        tip = f"{estimate.value:.3f}, from {estimate.low:.3f} to {estimate.high:.3f}, {estimate.tasks} tasks"
    drawing.dot(_place(estimate.value, low, high), y, "one", tip)


def _axis(drawing: _Drawing, low: float, high: float) -> None:
    y = drawing.down(LINE + 2)
    for step in range(5):
        value = low + (high - low) * step / 4
        drawing.text(_place(value, low, high), y, f"{value:.3g}", "soft", "middle")


def _place(value: float, low: float, high: float) -> float:
    share = (min(max(value, low), high) - low) / (high - low)
    return LEFT + share * (RIGHT - LEFT)


def tasks_plot(report: Report) -> str | None:
    """Every task as a square, in the same order for all cells of a taskset, so that columns compare."""
    if max(len(cell.tasks) for cell in report.cells) > MAX_SQUARES:
        return None
    drawing = _Drawing(TITLES["tasks"])
    side, step, across = 10, 12, 30
    for cell in report.cells:
        drawing.text(0, drawing.down(LINE), _name(cell, report))
        drawing.down(6)
        order = _hardest_first(report, cell.taskset)
        for place, at in enumerate(order):
            task = cell.tasks[at]
            x, y = place % across * step, drawing.y + place // across * step
            rate = task.pass_rate(report.threshold)
            tip = f"{task.id}: {task.passed(report.threshold)} of {len(task.counted)} passed"
            drawing.bar(x, y, side, side, "empty", tip=tip)
            if rate:
                drawing.bar(x, y + side * (1 - rate), side, side * rate, "three", tip=tip)
        drawing.down(-(-len(order) // across) * step)
    return drawing.svg()


def _hardest_first(report: Report, taskset: str) -> list[int]:
    cells = [cell for cell in report.cells if cell.taskset == taskset]
    rates = [
        sum(cell.tasks[at].pass_rate(report.threshold) or 0.0 for cell in cells)
        for at in range(len(cells[0].tasks))
    ]
    return sorted(range(len(rates)), key=lambda at: (rates[at], at))


def cost_plot(report: Report) -> str | None:
    tokens = [
        cell.cost.per_session(cell.cost.prompt_tokens + cell.cost.sampled_tokens) for cell in report.cells
    ]
    if not any(tokens):
        return None
    drawing = _Drawing(TITLES["cost"])
    y = drawing.down(12)
    for x, kind, words in ((0, "one", "prompt"), (70, "empty", "prompt, cached"), (178, "two", "sampled")):
        drawing.bar(x, y - 9, 10, 10, kind)
        drawing.text(x + 15, y, words, "soft")
    for cell, total in zip(report.cells, tokens, strict=True):
        cost = cell.cost
        drawing.text(0, drawing.down(LINE + 2), _name(cell, report))
        y = drawing.down(6)
        end = 0.0
        for kind, count in (
            ("one", cost.prompt_tokens - cost.cached_tokens),
            ("empty", cost.cached_tokens),
            ("two", cost.sampled_tokens),
        ):
            width = cost.per_session(count) / max(tokens) * (WIDTH - 60)
            drawing.bar(end, y, width, 10, kind)
            end += max(0.0, width)
        drawing.text(end + 5, y + 9, f"{total:,.0f}", "soft")
        drawing.down(10)
    return drawing.svg()


def failures_plot(report: Report) -> str | None:
    if not any(cell.failures for cell in report.cells):
        return None
    drawing = _Drawing(TITLES["failures"])
    most = max((count for cell in report.cells for count in cell.failures.values()), default=1)
    for cell in report.cells:
        if not cell.failures:
            continue
        drawing.text(0, drawing.down(LINE + 2), _name(cell, report))
        for reason, count in _most_frequent(cell):
            drawing.text(8, drawing.down(LINE - 2), reason, "soft")
            y = drawing.down(4)
            width = count / most * (WIDTH - 60)
            drawing.bar(8, y, width, 8, "two")
            drawing.text(width + 14, y + 8, str(count), "soft")
            drawing.down(8)
    return drawing.svg()


def _most_frequent(cell: Cell) -> list[tuple[str, int]]:
    reasons = list(cell.failures.items())
    if len(reasons) <= MAX_REASONS:
        return reasons
    rest = reasons[MAX_REASONS - 1 :]
    return [*reasons[: MAX_REASONS - 1], (f"{len(rest)} other reasons", sum(count for _, count in rest))]


def _name(cell: Cell, report: Report) -> str:
    """The parts of a cell's name that differ in this report, and no more: a phone is narrow."""
    differing = [part for part in ("harness", "model", "taskset") if differs(part, report)]
    return " · ".join(getattr(cell, part) for part in differing or ("harness", "model"))
