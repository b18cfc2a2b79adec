"""How long a sandbox takes before its first command has run, against a bare process that does the same."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from polar.runtimes.base import Command, Host, Runtime, Sandbox, SandboxSpec
from polar.runtimes.bubblewrap import BubblewrapRuntime
from polar.runtimes.process import ProcessRuntime

RUNS = 15
CROWD, MANY = 16, 300
COMMAND = Command(("/bin/true",))


async def _bare() -> float:
    started = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*COMMAND.argv)
    await process.wait()
    return (time.perf_counter() - started) * 1000


async def _sandboxed(runtime: Runtime, root: Path) -> tuple[float, float, float]:
    """Milliseconds to start a sandbox, to run a command in it, and to stop it."""
    marks = [time.perf_counter()]
    sandbox = await runtime.start(SandboxSpec("bench", "127.0.0.1", 9), Host(root))
    marks.append(time.perf_counter())
    result = await sandbox.exec(COMMAND, timeout=60, log_name="bench")
    marks.append(time.perf_counter())
    await sandbox.stop()
    marks.append(time.perf_counter())
    if result.exit_code != 0:
        raise SystemExit(f"the sandbox does not work: {result.stderr.text()}")
    start, run, stop = ((after - before) * 1000 for before, after in pairwise(marks))
    return start, run, stop


async def _measure() -> dict[str, float]:
    """Medians, the kinds taken in turn so that a busy moment strikes all of them."""
    kinds: dict[str, Runtime] = {
        "process": ProcessRuntime(ProcessRuntime.Options()),
        "bubblewrap": BubblewrapRuntime(BubblewrapRuntime.Options()),
    }
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as directory:
        for turn in range(RUNS + 1):
            took = {"bare process": await _bare()}
            for name, runtime in kinds.items():
                start, run, stop = await _sandboxed(runtime, Path(directory, f"{name}-{turn}"))
                took |= {f"{name} start": start, f"{name} exec": run, f"{name} stop": stop}
                took[f"{name} ready"] = start + run
            for name, milliseconds in took.items():
                # The first turn warms caches and probes what the machine can do.
                if turn > 0:
                    times.setdefault(name, []).append(milliseconds)
    return {name: statistics.median(values) for name, values in times.items()}


async def _among_others() -> dict[str, float]:
    """Milliseconds of a command, CROWD of them at a time, with as many sandboxes and with MANY."""
    runtime = BubblewrapRuntime(BubblewrapRuntime.Options())
    took = {}
    with tempfile.TemporaryDirectory(prefix="polar-bench-") as directory:
        sandboxes: list[Sandbox] = []
        for count in (CROWD, MANY):
            while len(sandboxes) < count:
                spec = SandboxSpec(f"s{len(sandboxes)}", "127.0.0.1", 9)
                sandboxes.append(await runtime.start(spec, Host(Path(directory))))
            rounds = []
            for _ in range(5):
                started = time.perf_counter()
                commands = (each.exec(COMMAND, timeout=60, log_name="bench") for each in sandboxes[:CROWD])
                await asyncio.gather(*commands)
                rounds.append((time.perf_counter() - started) * 1000 / CROWD)
            took[f"among {count}"] = statistics.median(rounds)
        for sandbox in sandboxes:
            await sandbox.stop()
    return took


def measure() -> dict[str, float]:
    """Milliseconds by what was measured; `… ready` is what a session waits for: start and first command.

    `among N` is a command of a sandbox where N stand on the machine.
    """
    return asyncio.run(_measure()) | asyncio.run(_among_others())


if __name__ == "__main__":
    for name, milliseconds in measure().items():
        print(f"{name:20} {milliseconds:8.1f} ms", file=sys.stdout)
