"""A report's plots as SVG: for narrow screens, in light or dark mode, without scripts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from xml.etree import ElementTree

from polar.evals.comparison import Comparison
from polar.evals.grids import differs, printable
from polar.evals.report import Cell, Report
from polar.evals.statistics import Estimate

WIDTH = 360
"""The drawing's width in its own units, which a phone shows one to one."""
LEFT, RIGHT = 44, 348
"""Where axes begin and end."""
LINE = 18
MAX_SQUARES = 600
"""With more tasks than this, squares become too small to tell apart; the table lists them all."""
MAX_REASONS = 6
LONGEST_LABEL = 52


@dataclass(frozen=True, slots=True)
class Plot:
    name: str
    """The name of its file."""
    title: str
    svg: str


class _Drawing:
    """Draws elements from the top down; `y` is the position of the next one."""

    def __init__(self, name: str, title: str) -> None:
        self._name, self._title = name, title
        self._root = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "polar-plot"}
        )
        ElementTree.SubElement(self._root, "style").text = _style()
        self.y = 4.0

    def down(self, by: float) -> float:
        self.y += by
        return self.y

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        words = printable(words)
        drawn = self._add("text", kind, x=x, y=y)
        drawn.set("text-anchor", anchor)
        drawn.text = words if len(words) <= LONGEST_LABEL else f"{words[: LONGEST_LABEL - 1]}…"

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._add("line", kind, x1=x1, y1=y1, x2=x2, y2=y2)

    def bar(self, x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> None:
        self._add("rect", kind, tip, x=x, y=y, width=max(0.0, width), height=height, rx=2)

    def dot(self, x: float, y: float, kind: str, tip: str) -> None:
        self._add("circle", kind, tip, cx=x, cy=y, r=4)

    def _add(self, tag: str, kind: str, tip: str = "", **places: float) -> ElementTree.Element:
        attributes = {name: f"{place:.1f}" for name, place in places.items()}
        drawn = ElementTree.SubElement(self._root, tag, {"class": kind, **attributes})
        if tip:
            ElementTree.SubElement(drawn, "title").text = printable(tip)
        return drawn

    def finish(self) -> Plot:
        frame = {"viewBox": f"0 0 {WIDTH} {self.y + 6:.0f}", "role": "img", "aria-label": self._title}
        self._root.attrib |= frame
        return Plot(self._name, self._title, ElementTree.tostring(self._root, encoding="unicode"))


@cache
def _style() -> str:
    return files("polar.evals").joinpath("templates/plot.css").read_text()


def plots(report: Report, comparison: Comparison | None = None) -> list[Plot]:
    """Return the plots in the order they are shown, leaving out empty ones."""
    drawn = [_pass_plot(report), _tasks_plot(report), _cost_plot(report), _failures_plot(report)]
    if comparison:
        drawn.append(comparison_plot(comparison))
    return [plot for plot in drawn if plot]


def _pass_plot(report: Report) -> Plot:
    drawing = _Drawing("pass-at-k", "pass@k with 95 % confidence intervals")
    for cell in report.cells:
        drawing.text(0, drawing.down(LINE + 4), _name(cell, report))
        for k in report.ks:
            if estimate := cell.metrics.get(f"pass@{k}"):
                _interval(drawing, f"k = {k}", estimate, 0.0, 1.0)
    _axis(drawing, 0.0, 1.0)
    return drawing.finish()


def comparison_plot(comparison: Comparison) -> Plot:
    drawing = _Drawing("comparison", "Difference of pass@1, after − before")
    differences = [cells.pass_difference for cells in comparison.cells]
    furthest = max(max(abs(one.low), abs(one.high)) for one in differences)
    reach = next(end for end in (0.1, 0.2, 0.4, 0.6, 1.0) if end >= furthest)
    middle = (LEFT + RIGHT) / 2
    for cells in comparison.cells:
        label = cells.before if cells.before == cells.after else f"{cells.before} → {cells.after}"
        drawing.text(0, drawing.down(LINE + 4), label)
        _interval(drawing, "", cells.pass_difference, -reach, reach)
        drawing.line(middle, drawing.y - 7, middle, drawing.y + 7, "zero")
    _axis(drawing, -reach, reach)
    return drawing.finish()


def _interval(drawing: _Drawing, label: str, estimate: Estimate, low: float, high: float) -> None:
    y = drawing.down(LINE - 2)
    drawing.text(LEFT - 8, y + 4, label, "soft", "end")
    drawing.line(LEFT, y, RIGHT, y, "rule")
    tip = f"{estimate.value:.3f}, one task only"
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


def _tasks_plot(report: Report) -> Plot | None:
    """Draw every task as a square, in the same order for all cells of a taskset, so that columns compare."""
    if max(len(cell.tasks) for cell in report.cells) > MAX_SQUARES:
        return None
    drawing = _Drawing("tasks", "One square per task, hardest first; the fuller, the more samples passed")
    side, step, across = 10, 12, 30
    for cell in report.cells:
        drawing.text(0, drawing.down(LINE), _name(cell, report))
        drawing.down(6)
        for place, at in enumerate(_hardest_first(report, cell.taskset)):
            task = cell.tasks[at]
            x, y = place % across * step, drawing.y + place // across * step
            filled = side * (task.pass_rate(report.threshold) or 0.0)
            tip = f"{task.id}: {task.passed(report.threshold)} of {len(task.counted)} passed"
            drawing.bar(x, y, side, side, "empty", tip)
            if filled:
                drawing.bar(x, y + side - filled, side, filled, "three", tip)
        drawing.down(-(-len(cell.tasks) // across) * step)
    return drawing.finish()


def _hardest_first(report: Report, taskset: str) -> list[int]:
    cells = [cell for cell in report.cells if cell.taskset == taskset]
    rates = [
        sum(task.pass_rate(report.threshold) or 0.0 for task in same)
        for same in zip(*(cell.tasks for cell in cells), strict=True)
    ]
    return sorted(range(len(rates)), key=rates.__getitem__)


def _cost_plot(report: Report) -> Plot | None:
    most = max(cell.cost.tokens_per_session for cell in report.cells)
    if not most:
        return None
    drawing = _Drawing("cost", "Tokens per session: prompt (of which cached) and sampled")
    y = drawing.down(12)
    for x, kind, words in ((0, "one", "prompt"), (70, "empty", "prompt, cached"), (178, "two", "sampled")):
        drawing.bar(x, y - 9, 10, 10, kind)
        drawing.text(x + 15, y, words, "soft")
    for cell in report.cells:
        cost = cell.cost
        drawing.text(0, drawing.down(LINE + 2), _name(cell, report))
        y, end = drawing.down(6), 0.0
        computed = cost.prompt_tokens - cost.cached_tokens
        for kind, count in (("one", computed), ("empty", cost.cached_tokens), ("two", cost.sampled_tokens)):
            width = cost.per_session(count) / most * (WIDTH - 60)
            drawing.bar(end, y, width, 10, kind)
            end += max(0.0, width)
        drawing.text(end + 5, y + 9, f"{cost.tokens_per_session:,.0f}", "soft")
        drawing.down(10)
    return drawing.finish()


def _failures_plot(report: Report) -> Plot | None:
    cells = [cell for cell in report.cells if cell.failures]
    if not cells:
        return None
    drawing = _Drawing("failures", "Why sessions did not pass")
    most = max(max(cell.failures.values()) for cell in cells)
    for cell in cells:
        drawing.text(0, drawing.down(LINE + 2), _name(cell, report))
        for reason, count in _most_frequent(cell):
            drawing.text(8, drawing.down(LINE - 2), reason, "soft")
            y, width = drawing.down(4), count / most * (WIDTH - 60)
            drawing.bar(8, y, width, 8, "two")
            drawing.text(width + 14, y + 8, str(count), "soft")
            drawing.down(8)
    return drawing.finish()


def _most_frequent(cell: Cell) -> list[tuple[str, int]]:
    reasons = list(cell.failures.items())
    if len(reasons) <= MAX_REASONS:
        return reasons
    rest = reasons[MAX_REASONS - 1 :]
    return [*reasons[: MAX_REASONS - 1], (f"{len(rest)} other reasons", sum(count for _, count in rest))]


def _name(cell: Cell, report: Report) -> str:
    """Return only the parts of a cell's name that differ in this report: a phone is narrow."""
    differing = [part for part in ("harness", "model", "taskset") if differs(part, report)]
    return " · ".join(getattr(cell, part) for part in differing or ("harness", "model"))
