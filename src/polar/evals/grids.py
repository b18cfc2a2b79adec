"""A report's tables as plain text cells, the same for terminal, Markdown and HTML."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from polar.evals.comparison import Comparison, PairedCells, TaskChange
from polar.evals.report import COMPLETED, MEAN_REWARD, Cell, Report
from polar.evals.statistics import Estimate

_UNPRINTABLE = {
    **{code: 0x2400 + code for code in range(32)},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
    **dict.fromkeys([0xFFFE, 0xFFFF], 0xFFFD),
}


def printable(text: str) -> str:
    """Text without characters that XML forbids or that reorder a page; an agent's error may hold any."""
    return text.translate(_UNPRINTABLE)


@dataclass(frozen=True, slots=True)
class Grid:
    """A table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    """The number of columns at the left that hold text; the others hold numbers."""
    note: str = ""


def report_grids(report: Report) -> Iterator[Grid]:
    """All tables of a report but those of single tasks."""
    yield results_grid(report)
    yield cost_grid(report)
    yield from (grid for grid in (failures_grid(report), _excluded_grid(report)) if grid.rows)


def facts(report: Report) -> str:
    """The line under the title."""
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(report.created_at))
    samples = f"{report.samples} sample{'s' * (report.samples != 1)} per task"
    seed = "" if report.seed is None else f", seed {report.seed}"
    about = f"Run {report.run} {_subject(report)}".strip()
    return f"{about}: {samples}{seed}. {made}, Polar {report.polar_version}."


def _subject(report: Report) -> str:
    """What the whole report is about: whatever all of its cells have in common."""
    shared = [part for part in _PARTS if part not in _telling(report)]
    words = {"taskset": "on {}", "model": "with {}"}
    return " ".join(words[part].format(printable(getattr(report.cells[0], part))) for part in shared)


def results_grid(report: Report) -> Grid:
    names = [f"pass@{k}" for k in report.ks]
    rows = [
        (
            *_names(cell, report),
            *(_interval(cell.metrics.get(name)) for name in (*names, MEAN_REWARD)),
            _percent(cell.metrics.get(COMPLETED)),
            str(len(cell.tasks)),
            str(cell.cost.sessions),
        )
        for cell in report.cells
    ]
    note = f"Passed: reward at least {report.threshold:g}. In brackets 95 % confidence intervals over tasks."
    parts = _telling(report)
    columns = (*parts, *names, "mean reward", "completed", "tasks", "sessions")
    return Grid("Results", columns, tuple(rows), len(parts), note)


def cost_grid(report: Report) -> Grid:
    rows = []
    for cell in report.cells:
        cost = cell.cost
        passed = sum(task.passed(report.threshold) for task in cell.tasks)
        tokens = cost.prompt_tokens + cost.sampled_tokens
        rows.append(
            (
                *_names(cell, report),
                f"{cost.per_session(cost.completions):.1f}",
                _count(cost.per_session(cost.prompt_tokens)),
                f"{cost.cached_tokens / cost.prompt_tokens:.0%}" if cost.prompt_tokens else "–",
                _count(cost.per_session(cost.sampled_tokens)),
                f"{cost.per_session(cost.agent_seconds):.1f}",
                f"{cost.per_session(cost.seconds):.1f}",
                _count(tokens),
                _count(tokens / passed) if passed else "–",
            )
        )
    parts = _telling(report)
    columns = (
        *(*parts, "completions", "prompt tokens", "of these cached", "sampled tokens"),
        *("agent s", "all s", "tokens in all", "tokens per pass"),
    )
    note = "Means per session, but for the last two. Cached is what the engine says; some do not say it."
    return Grid("Cost", columns, tuple(rows), len(parts), note)


def failures_grid(report: Report) -> Grid:
    rows = [
        (
            *_names(cell, report),
            printable(reason),
            next(one.session_id for one in cell.attempts if one.reason(report.threshold) == reason),
            str(count),
            f"{count / max(1, len(list(cell.attempts))):.0%}",
        )
        for cell in report.cells
        for reason, count in cell.failures.items()
    ]
    parts = _telling(report)
    columns = (*parts, "why it did not pass", "for example", "sessions", "of all")
    return Grid("Failures", columns, tuple(rows), len(parts) + 2)


def _excluded_grid(report: Report) -> Grid:
    rows = [
        (*_names(cell, report), printable(reason), _count(count))
        for cell in report.cells
        for reason, count in cell.excluded.items()
    ]
    parts = _telling(report)
    columns = (*parts, "why tokens are not trainable", "tokens")
    return Grid("Tokens left out of training", columns, tuple(rows), len(parts) + 1)


def task_grids(report: Report) -> Iterator[Grid]:
    """For each taskset its tasks, with a column for every harness and model."""
    for taskset in dict.fromkeys(cell.taskset for cell in report.cells):
        cells = [cell for cell in report.cells if cell.taskset == taskset]
        models = {cell.model for cell in cells}
        columns = [
            printable(cell.harness if len(models) == 1 else f"{cell.harness} · {cell.model}")
            for cell in cells
        ]
        rows = []
        for at, task in enumerate(cells[0].tasks):
            outcomes = [cell.tasks[at] for cell in cells]
            counts = [f"{one.passed(report.threshold)}/{len(one.counted)}" for one in outcomes]
            rewards = ["–" if one.mean_reward is None else f"{one.mean_reward:.2f}" for one in outcomes]
            rows.append(
                (task.id, *(f"{count} ({reward})" for count, reward in zip(counts, rewards, strict=True)))
            )
        note = "Samples passed of those attempted, and their mean reward."
        yield Grid(f"Tasks of {printable(taskset)}", ("task", *columns), tuple(rows), 1, note)


def comparison_grids(comparison: Comparison) -> Iterator[Grid]:
    yield _differences_grid(comparison)
    yield from (grid for grid in map(changed_grid, comparison.cells) if grid.rows)


def _differences_grid(comparison: Comparison) -> Grid:
    rows = [
        (
            printable(cells.taskset),
            printable(cells.before),
            printable(cells.after),
            str(len(cells.tasks)),
            f"{cells.pass_before:.3f} → {cells.pass_after:.3f}",
            _signed(cells.pass_difference),
            f"{cells.p:.3g}",
            _signed(cells.reward_difference),
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
    seeds = "with the same seeds" if comparison.seeds_match else "by their numbers, not by seed"
    unpaired = sum(cells.unpaired for cells in comparison.cells)
    note = f"Paired by task and sample ({seeds}). 95 % bootstrap intervals and sign-flip p, both over tasks."
    if unpaired:
        note += f" {unpaired} tasks are in one run only, or ask something else there, and are left out."
    return Grid(f"From {comparison.before} to {comparison.after}", columns, tuple(rows), 3, printable(note))


def changed_grid(cells: PairedCells) -> Grid:
    """The tasks that changed, the most changed first."""
    moved = [pair for pair in cells.tasks if pair.change is not TaskChange.SAME]
    moved.sort(key=lambda pair: (-abs(pair.passed_after - pair.passed_before) / pair.samples, pair.id))
    rows = [
        (pair.id, pair.change, f"{pair.passed_before}/{pair.samples}", f"{pair.passed_after}/{pair.samples}")
        for pair in moved
    ]
    title = f"Tasks that changed: {cells.before} → {cells.after}"
    return Grid(printable(title), ("task", "change", "before", "after"), tuple(rows), 2)


_PARTS = ("taskset", "harness", "model")


def differs(part: str, report: Report) -> bool:
    """Whether the cells of a report differ in this part of their name."""
    return len({getattr(cell, part) for cell in report.cells}) > 1


def _telling(report: Report) -> tuple[str, ...]:
    """The parts of a cell's name that tell it from the others, and always the harness."""
    return tuple(part for part in _PARTS if part == "harness" or differs(part, report))


def _names(cell: Cell, report: Report) -> tuple[str, ...]:
    version = f" {cell.harness_version}" if cell.harness_version else ""
    names = {"taskset": cell.taskset, "harness": cell.harness + version, "model": cell.model}
    return tuple(printable(names[part]) for part in _telling(report))


def _interval(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    return f"{estimate.value:.3f} {_bounds(estimate, '.2f')}"


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} {_bounds(estimate, '+.2f')}"


def _bounds(estimate: Estimate, form: str) -> str:
    if not estimate.has_interval:
        return "[n/a: one task]"
    return f"[{estimate.low:{form}}, {estimate.high:{form}}]"


def _percent(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{estimate.value:.0%}"


def _count(number: float) -> str:
    """A number of tokens, with spaces between thousands as no language reads them otherwise."""
    return f"{number:,.0f}".replace(",", "\N{NARROW NO-BREAK SPACE}")
