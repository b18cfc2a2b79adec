"""Two evaluations side by side: the same tasks, paired, and what changed between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from statistics import fmean

from polar.errors import InvalidInput
from polar.evals.plan import Plan
from polar.evals.report import Cell, Report, TaskOutcome
from polar.evals.statistics import Estimate, mean_of_values, sign_flip_p
from polar.models.component import Frozen


class TaskChange(StrEnum):
    """How a task changed between two evaluations."""

    GAINED = "gained"
    """Never passed before and passes now."""
    LOST = "lost"
    """Passed before and never passes now."""
    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


class TaskPair(Frozen):
    """One task in both evaluations, over the samples that both have."""

    id: str
    samples: int
    passed_before: int
    passed_after: int

    @property
    def change(self) -> TaskChange:
        before, after = self.passed_before, self.passed_after
        if before == after:
            return TaskChange.SAME
        if after > before:
            return TaskChange.BETTER if before else TaskChange.GAINED
        return TaskChange.WORSE if after else TaskChange.LOST


class PairCounts(Frozen):
    """McNemar's table: the number of sample pairs in which both passed, one did, or neither did."""

    both: int = 0
    only_before: int = 0
    only_after: int = 0
    neither: int = 0


class PairedCells(Frozen):
    """A harness with a model on a taskset, before and after."""

    before: str
    after: str
    taskset: str
    pass_before: float
    pass_after: float
    pass_difference: Estimate
    """The change in the fraction of samples that passed, with its interval over tasks."""
    reward_difference: Estimate
    p: float
    """The two-sided probability, over tasks, of a difference at least this large by chance."""
    outcomes: PairCounts
    tokens_before: float
    """Mean number of prompt and sampled tokens per session."""
    tokens_after: float
    seconds_before: float
    seconds_after: float
    tasks: tuple[TaskPair, ...]
    unpaired: int
    """Number of tasks that only one of the two has, or that differ in content."""


class Comparison(Frozen):
    before: str
    after: str
    seeds_match: bool
    """Whether equal samples had equal seeds. If not, samples pair only by number; tasks pair regardless."""
    cells: tuple[PairedCells, ...]


def compare(before: Report, after: Report, names: tuple[str, str] = ("before", "after")) -> Comparison:
    """Pair what both evaluated; raise InvalidInput if they have nothing in common."""
    if abs(before.threshold - after.threshold) > 1e-9:
        raise InvalidInput(
            f"{names[0]} requires a reward of {before.threshold:g} to pass, {names[1]} one of"
            f" {after.threshold:g}",
            hint="evaluate again with the same --pass-reward",
        )
    matched = list(_matches(before, after))
    if not matched:
        raise InvalidInput(
            f"{names[0]} and {names[1]} have no task in common", hint=_describe_mismatch(before, after)
        )
    paired = tuple(_pair_cells(one, other, before.threshold) for one, other in matched)
    drawn = [(one.seed, one.has_seeds_of_tasks) for one in (before, after)]
    seeds_match = before.seed is not None and drawn[0] == drawn[1]
    return Comparison(before=names[0], after=names[1], seeds_match=seeds_match, cells=paired)


def check_comparable(plan: Plan, earlier: Report, name: str) -> None:
    """Raise before hours are spent on an evaluation that an earlier report cannot be compared with."""
    mine = {(task.id, task.digest) for cell in plan.cells for task in cell.tasks}
    if not any(mine & _identities(cell) for cell in earlier.cells):
        tasksets = ", ".join(sorted({cell.taskset for cell in earlier.cells}))
        raise InvalidInput(f"{name}: no task in common", hint=f"it evaluated {tasksets}")
    if abs(earlier.threshold - plan.conditions.threshold) > 1e-9:
        raise InvalidInput(
            f"{name}: that report required a reward of {earlier.threshold:g} to pass",
            hint=f"give --pass-reward {earlier.threshold:g}",
        )


def _describe_mismatch(before: Report, after: Report) -> str:
    one, other = ({cell.taskset for cell in report.cells} for report in (before, after))
    if one == other:
        return "their tasksets differ in content, or their harnesses and models do not match"
    return f"the first evaluated {', '.join(sorted(one))}, the second {', '.join(sorted(other))}"


def _matches(before: Report, after: Report) -> Iterator[tuple[Cell, Cell]]:
    """Pair cells with the same harness and model, else the only ones that share one of the two.

    This leaves one difference at a time: another model with the same harness, or the reverse. Cells that
    differ in both are paired only if there is no choice.
    """
    left, right = list(before.cells), list(after.cells)
    keys: tuple[Callable[[Cell], object], ...] = (
        lambda cell: (cell.harness, cell.model),
        lambda cell: cell.harness,
        lambda cell: cell.model,
        lambda cell: None,
    )
    for key in keys:
        for cell in list(left):
            mine = [one for one in left if _is_related(one, cell) and key(one) == key(cell)]
            others = [one for one in right if _is_related(one, cell) and key(one) == key(cell)]
            if len(mine) == len(others) == 1:
                left.remove(cell)
                right.remove(others[0])
                yield cell, others[0]


def _is_related(one: Cell, other: Cell) -> bool:
    return one is other or bool(_identities(one) & _identities(other))


def _identities(cell: Cell) -> frozenset[tuple[str, str]]:
    return frozenset((task.id, task.digest) for task in cell.tasks)


def _pair_cells(before: Cell, after: Cell, threshold: float) -> PairedCells:
    others = {(task.id, task.digest): task for task in after.tasks}
    common = [
        (task, others[task.id, task.digest]) for task in before.tasks if (task.id, task.digest) in others
    ]
    pairs, rewards, outcomes = [], [], Counter[tuple[bool, bool]]()
    for one, other in common:
        samples = list(_samples(one, other, threshold))
        if not samples:
            continue
        outcomes.update((was, now) for was, now, _ in samples)
        passed_before, passed_after = (sum(sample[at] for sample in samples) for at in (0, 1))
        pairs.append(
            TaskPair(id=one.id, samples=len(samples), passed_before=passed_before, passed_after=passed_after)
        )
        rewards.append(fmean(gain for _, _, gain in samples))
    passes = [(pair.passed_after - pair.passed_before) / pair.samples for pair in pairs]
    pass_difference, reward_difference = mean_of_values(passes), mean_of_values(rewards)
    if pass_difference is None or reward_difference is None:
        raise InvalidInput(f"{before.name} and {after.name} have no finished sample in common")
    return PairedCells(
        before=f"{before.harness} · {before.model}",
        after=f"{after.harness} · {after.model}",
        taskset=after.taskset,
        pass_before=fmean(pair.passed_before / pair.samples for pair in pairs),
        pass_after=fmean(pair.passed_after / pair.samples for pair in pairs),
        pass_difference=pass_difference,
        reward_difference=reward_difference,
        p=sign_flip_p(passes),
        outcomes=PairCounts(
            both=outcomes[True, True],
            only_before=outcomes[True, False],
            only_after=outcomes[False, True],
            neither=outcomes[False, False],
        ),
        tokens_before=before.cost.tokens_per_session,
        tokens_after=after.cost.tokens_per_session,
        seconds_before=before.cost.per_session(before.cost.seconds),
        seconds_after=after.cost.per_session(after.cost.seconds),
        tasks=tuple(pairs),
        unpaired=len(before.tasks) + len(after.tasks) - 2 * len(common),
    )


def _samples(before: TaskOutcome, after: TaskOutcome, threshold: float) -> Iterator[tuple[bool, bool, float]]:
    """Yield for each sample that both have: whether it passed before and after, and the change in reward."""
    later = {attempt.sample: attempt for attempt in after.counted}
    for attempt in before.counted:
        if other := later.get(attempt.sample):
            gain = (other.reward or 0.0) - (attempt.reward or 0.0)
            yield attempt.passed(threshold), other.passed(threshold), gain
