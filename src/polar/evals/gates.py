"""What an evaluation must reach for a pipeline to go on: `metric=minimum`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from polar.errors import InvalidInput
from polar.evals.report import COMPLETED, MEAN_REWARD, Report


@dataclass(frozen=True, slots=True)
class Gate:
    metric: str
    minimum: float


def parse_gate(text: str, ks: Sequence[int]) -> Gate:
    """`pass@1=0.4`; a metric that the report will not have is an error before anything runs."""
    metric, found, number = (part.strip() for part in text.partition("="))
    if not found:
        raise InvalidInput(f"--fail-under: {text!r} is not METRIC=MINIMUM", hint="for example pass@1=0.4")
    known = [*(f"pass@{k}" for k in ks), MEAN_REWARD, COMPLETED]
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise InvalidInput(f"--fail-under: unknown metric {metric!r}", hint=hint)
    try:
        minimum = float(number)
    except ValueError:
        minimum = math.nan
    if not math.isfinite(minimum):
        raise InvalidInput(f"--fail-under: {number!r} is not a number")
    return Gate(metric, minimum)


def failures(report: Report, gates: Sequence[Gate]) -> list[str]:
    """One line for each harness, model and taskset that stays below a gate. Its estimate decides."""
    lines = []
    for gate in gates:
        for cell in report.cells:
            estimate = cell.metrics.get(gate.metric)
            if estimate is None:
                lines.append(f"{cell.name}: {gate.metric} is not there: no task has enough samples")
            elif estimate.value < gate.minimum - 1e-9:
                lines.append(f"{cell.name}: {gate.metric} is {estimate.value:.3f}, under {gate.minimum:g}")
    return lines
