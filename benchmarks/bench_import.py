"""How long a user waits for `import polar` and `polar --help`, against starting Python itself."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.report import at_most, report

RUNS = 15
IMPORT_GOAL_MS = 150.0
HELP_GOAL_MS = 300.0


def milliseconds(*arguments: str) -> float:
    """Median wall-clock of the command, after one run that warms the disk cache."""
    times = []
    for _ in range(RUNS + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append((time.perf_counter() - started) * 1000)
    return statistics.median(times[1:])


def main() -> None:
    bare = milliseconds("-c", "pass")
    imported = milliseconds("-c", "import polar") - bare
    help_shown = milliseconds("-m", "polar", "--help")
    report(
        "import",
        [
            at_most("import polar, beyond starting Python", imported, "ms", IMPORT_GOAL_MS),
            at_most("polar --help (peer: python -c pass)", help_shown, "ms", HELP_GOAL_MS, peer=bare),
        ],
    )


if __name__ == "__main__":
    main()
