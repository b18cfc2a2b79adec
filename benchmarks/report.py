"""How every benchmark reports: one table, one JSON file, and an exit code that says if a goal is missed."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    """The same quantity of what we compare with, in the same run."""
    goal: str | None = None
    """What is promised, in words; None: measured for information."""
    met: bool | None = None
    """Whether the goal is met; set exactly when there is one."""


def at_least(name: str, ours: float, unit: str, share: float, peer: float) -> Row:
    """A row whose goal is a share of the peer's number."""
    goal = f"≥ {share:g} × peer"
    return Row(name, ours, unit, peer, f"{goal} = {share * peer:.1f}", ours >= share * peer)


def at_most(name: str, ours: float, unit: str, limit: float, peer: float | None = None) -> Row:
    """A row that must not exceed a limit."""
    return Row(name, ours, unit, peer, f"≤ {limit:g}", ours <= limit)


def report(name: str, rows: Sequence[Row], *, is_whole: bool = True) -> None:
    """Print the table, write results/NAME.json unless it is not the whole, and exit 1 if a goal is missed."""
    table = Table(title=f"bench-{name}", title_justify="left")
    for column in ("measured", "ours", "peer", "unit", "goal", ""):
        table.add_column(column, justify="right" if column in ("ours", "peer") else "left")
    for row in rows:
        peer = "" if row.peer is None else f"{row.peer:,.1f}"
        verdict = {True: "[green]met", False: "[red]missed", None: ""}[row.met]
        table.add_row(row.name, f"{row.ours:,.1f}", peer, row.unit, row.goal or "", verdict)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if is_whole:
        _keep(name, rows)
    else:
        print("this is not the whole benchmark: no result is kept", file=sys.stderr)
    if any(row.met is False for row in rows):
        raise SystemExit(1)


def _keep(name: str, rows: Sequence[Row]) -> None:
    RESULTS.mkdir(exist_ok=True)
    document = {
        "name": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def machine() -> dict[str, str | int | None]:
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
