"""A report's tables as plain text cells, shared by terminal, Markdown and HTML."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polar.evals.comparison import Comparison, PairedCells, TaskChange
from polar.evals.report import COMPLETED, MEAN_REWARD, Cell, Report, TaskOutcome
from polar.evals.statistics import Estimate

_UNPRINTABLE = {
    **{code: 0x2400 + code for code in range(32)},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
    **dict.fromkeys([0xFFFE, 0xFFFF], 0xFFFD),
}


def printable(text: str) -> str:
    """Replace characters that XML forbids or that reorder text; an agent's error may contain any."""
    return text.translate(_UNPRINTABLE)


@dataclass(frozen=True, slots=True)
class Grid:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """The number of columns on the left that hold text; the others hold numbers."""
    note: str = ""
    is_folded: bool = False
    """Whether the table is long and collapsed on the page."""


def report_grids(report: Report) -> Iterator[Grid]:
    """Yield all tables of a report except those of single tasks."""
    yield _results_grid(report)
    yield _cost_grid(report)
    yield from (grid for grid in (_failures_grid(report), _excluded_grid(report)) if grid.rows)


def facts(report: Report) -> str:
    """Return the line under the title."""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.created_at))
    samples = f"{report.samples} sample{'s' * (report.samples != 1)} per task"
    seed = "" if report.seed is None else f", seed {report.seed}"
    weights = "" if report.weights is None else f", weights {report.weights[:12]}"
    about = f"Run {report.run} {_subject(report)}".strip()
    return f"{about}: {samples}{seed}{weights}. {made}, Polar {report.polar_version}."


def _subject(report: Report) -> str:
    shared = [part for part in _PARTS if part not in _distinctive_parts(report)]
    words = {"taskset": "on {}", "model": "with {}"}
    return " ".join(words[part].format(printable(getattr(report.cells[0], part))) for part in shared)


def _results_grid(report: Report) -> Grid:
    passes = [f"pass@{k}" for k in report.ks]
    rows = [
        [
            *(_interval(cell.metrics.get(name)) for name in (*passes, MEAN_REWARD)),
            f"{cell.metrics[COMPLETED].value:.0%}" if COMPLETED in cell.metrics else "–",
            str(len(cell.tasks)),
            str(cell.cost.sessions),
        ]
        for cell in report.cells
    ]
    note = f"Passed: reward at least {report.threshold:g}. In brackets 95 % confidence intervals over tasks."
    columns = (*passes, "mean reward", "completed", "tasks", "sessions")
    return _of_cells(report, "Results", columns, zip(report.cells, rows, strict=True), note=note)


def _cost_grid(report: Report) -> Grid:
    rows = []
    for cell in report.cells:
        cost = cell.cost
        passed = sum(task.passed(report.threshold) for task in cell.tasks)
        rows.append(
            [
                f"{cost.per_session(cost.completions):.1f}",
                _count(cost.per_session(cost.prompt_tokens)),
                f"{cost.cached_tokens / cost.prompt_tokens:.0%}" if cost.prompt_tokens else "–",
                _count(cost.per_session(cost.sampled_tokens)),
                f"{cost.per_session(cost.agent_seconds):.1f}",
                f"{cost.per_session(cost.seconds):.1f}",
                _count(cost.tokens),
                _count(cost.tokens / passed) if passed else "–",
            ]
        )
    columns = (
        *("completions", "prompt tokens", "cached", "sampled tokens"),
        *("agent s", "all s", "tokens in all", "tokens per pass"),
    )
    note = "Means per session, except in the last two columns. Some engines do not report cached tokens."
    return _of_cells(report, "Cost", columns, zip(report.cells, rows, strict=True), note=note)


def _failures_grid(report: Report) -> Grid:
    rows = [
        (
            cell,
            [
                printable(reason),
                next(one.session_id for one in cell.attempts if one.reason(report.threshold) == reason),
                str(count),
                f"{count / max(1, len(list(cell.attempts))):.0%}",
            ],
        )
        for cell in report.cells
        for reason, count in cell.failures.items()
    ]
    columns = ("why it did not pass", "for example", "sessions", "of all")
    return _of_cells(report, "Failures", columns, rows, words=2)


def _excluded_grid(report: Report) -> Grid:
    rows = [
        (cell, [printable(reason), _count(count)])
        for cell in report.cells
        for reason, count in cell.excluded.items()
    ]
    columns = ("why tokens are not trainable", "tokens")
    return _of_cells(report, "Tokens left out of training", columns, rows, words=1)


def _of_cells(
    report: Report,
    title: str,
    columns: tuple[str, ...],
    rows: Iterable[tuple[Cell, list[str]]],
    *,
    words: int = 0,
    note: str = "",
) -> Grid:
    """Build a table whose rows begin with the name of their cell; `words` counts further text columns."""
    parts = _distinctive_parts(report)
    named = tuple((*_names(cell, parts), *row) for cell, row in rows)
    return Grid(title, (*parts, *columns), named, len(parts) + words, note)


def task_grids(report: Report) -> Iterator[Grid]:
    """Yield a table of tasks for each taskset, with a column for every harness and model."""
    for taskset in dict.fromkeys(cell.taskset for cell in report.cells):
        cells = [cell for cell in report.cells if cell.taskset == taskset]
        has_models = len({cell.model for cell in cells}) > 1
        columns = [
            printable(f"{cell.harness} · {cell.model}" if has_models else cell.harness) for cell in cells
        ]
        rows = tuple(
            (same[0].id, *(_pass_count(task, report.threshold) for task in same))
            for same in zip(*(cell.tasks for cell in cells), strict=True)
        )
        note = "Samples passed out of those attempted, and their mean reward."
        title = f"Tasks of {printable(taskset)}"
        yield Grid(title, ("task", *columns), rows, note=note, is_folded=True)


def _pass_count(task: TaskOutcome, threshold: float) -> str:
    reward = "–" if task.mean_reward is None else f"{task.mean_reward:.2f}"
    return f"{task.passed(threshold)}/{len(task.counted)} ({reward})"


def comparison_grids(comparison: Comparison) -> Iterator[Grid]:
    yield _differences_grid(comparison)
    yield from (grid for grid in map(_changed_grid, comparison.cells) if grid.rows)


def _differences_grid(comparison: Comparison) -> Grid:
    rows = [
        (
            printable(cells.taskset),
            printable(cells.before),
            printable(cells.after),
            str(len(cells.tasks)),
            f"{cells.pass_before:.3f} → {cells.pass_after:.3f}",
            _signed_interval(cells.pass_difference),
            f"{cells.p:.3g}",
            _signed_interval(cells.reward_difference),
            f"{cells.outcomes.only_before} : {cells.outcomes.only_after}",
            f"{_count(cells.tokens_before)} → {_count(cells.tokens_after)}",
            f"{cells.seconds_before:.1f} → {cells.seconds_after:.1f}",
        )
        for cells in comparison.cells
    ]
    columns = (
        *("taskset", "before", "after", "tasks", "pass@1", "difference", "p", "reward difference"),
        *("passed only before : after", "tokens per session", "seconds"),
    )
    seeds = "with the same seeds" if comparison.seeds_match else "by number, with different seeds"
    unpaired = sum(cells.unpaired for cells in comparison.cells)
    note = f"Paired by task and sample ({seeds}). 95 % bootstrap intervals and sign-flip p, both over tasks."
    if unpaired:
        note += f" {unpaired} tasks are in only one run, or differ between the two, and are left out."
    return Grid(f"From {comparison.before} to {comparison.after}", columns, tuple(rows), 3, printable(note))


def _changed_grid(cells: PairedCells) -> Grid:
    """List the tasks that changed, those that changed most first."""
    moved = [pair for pair in cells.tasks if pair.change is not TaskChange.SAME]
    moved.sort(key=lambda pair: (-abs(pair.passed_after - pair.passed_before) / pair.samples, pair.id))
    rows = [
        (pair.id, pair.change, f"{pair.passed_before}/{pair.samples}", f"{pair.passed_after}/{pair.samples}")
        for pair in moved
    ]
    title = f"Tasks that changed: {cells.before} → {cells.after}"
    return Grid(printable(title), ("task", "change", "before", "after"), tuple(rows), 2, is_folded=True)


_PARTS = ("taskset", "harness", "model")


def differs(part: str, report: Report) -> bool:
    """Whether the cells of a report differ in this part of their name."""
    return len({getattr(cell, part) for cell in report.cells}) > 1


def _distinctive_parts(report: Report) -> tuple[str, ...]:
    """Return the parts of a cell's name that distinguish it, which always include the harness."""
    return tuple(part for part in _PARTS if part == "harness" or differs(part, report))


def _names(cell: Cell, parts: tuple[str, ...]) -> tuple[str, ...]:
    version = f" {cell.harness_version}" if cell.harness_version else ""
    names = {"taskset": cell.taskset, "harness": cell.harness + version, "model": cell.model}
    return tuple(printable(names[part]) for part in parts)


def _interval(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{estimate.value:.3f} {_bounds(estimate, '.2f')}"


def _signed_interval(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} {_bounds(estimate, '+.2f')}"


def _bounds(estimate: Estimate, form: str) -> str:
    if not estimate.has_interval:
        return "[n/a: one task]"
    return f"[{estimate.low:{form}}, {estimate.high:{form}}]"


def _count(number: float) -> str:
    """Format a number with narrow spaces between thousands, which reads the same in every language."""
    return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
