"""Training runs by the numbers they write: every metrics.jsonl below one directory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from polar.errors import NotFound
from polar.models.dashboard import RunCurves, RunLine

FILE = "metrics.jsonl"
DEPTH = 3
"""How many directories below the given one a run may lie."""
POINTS = 1000
"""How many points a curve has at most: more than a screen has columns for."""


def runs(directory: Path) -> tuple[RunLine, ...]:
    """The one that was written to last comes first."""
    found = []
    for file in _files(directory):
        steps = list(_steps(file))
        if steps:
            latest = {name: value for name, value in steps[-1].items() if name != "step"}
            updated_at = file.stat().st_mtime
            found.append(
                RunLine(name=_name(directory, file), steps=len(steps), updated_at=updated_at, latest=latest)
            )
    return tuple(sorted(found, key=lambda run: -run.updated_at))


def curves(directory: Path, name: str) -> RunCurves:
    """The numbers of a run; of a long one every n-th step and the last."""
    file = next((file for file in _files(directory) if _name(directory, file) == name), None)
    if file is None:
        raise NotFound(f"no training run {name!r}")
    steps = list(_steps(file))
    stride = max(math.ceil(len(steps) / POINTS), 1)
    kept = steps[::-1][::stride][::-1]
    names = dict.fromkeys(key for step in kept for key in step if key != "step")
    return RunCurves(
        name=name,
        steps=tuple(int(step["step"]) for step in kept),
        series={key: tuple(step.get(key) for step in kept) for key in names},
    )


def _files(directory: Path) -> Iterator[Path]:
    for depth in range(DEPTH + 1):
        yield from sorted(directory.glob("*/" * depth + FILE))


def _name(directory: Path, file: Path) -> str:
    relative = file.parent.relative_to(directory).as_posix()
    return directory.resolve().name if relative == "." else relative


def _steps(file: Path) -> Iterator[dict[str, float]]:
    """Each step's numbers; a line that is still being written is not one yet."""
    with file.open() as lines:
        for line in lines:
            try:
                numbers = json.loads(line)
            except ValueError:
                continue
            if isinstance(numbers, dict) and isinstance(numbers.get("step"), int):
                yield {key: value for key, value in numbers.items() if _is_number(value)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
