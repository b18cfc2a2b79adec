"""Memory of an idle `polar serve` whose engine is elsewhere."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks.report import at_most, report

GOAL_MB = 250.0


def resident_mb(process: psutil.Process) -> float:
    resident: int = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)])
    return resident / 2**20


def started(arguments: list[str], word: str) -> tuple[subprocess.Popen[str], str]:
    """The process, once it has printed a line that begins with `word`."""
    process = subprocess.Popen([sys.executable, "-m", "polar", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return process, line.split()[-1]
    raise SystemExit(f"polar {arguments[0]} did not start")


def main() -> None:
    engine, url = started(["engine", "--port", "0"], "ready")
    try:
        with tempfile.TemporaryDirectory() as directory:
            arguments = ["--port", "0", "--data-dir", str(Path(directory, "data")), "--engine-url", url]
            server, _ = started(["serve", *arguments], "serving")
            try:
                memory = resident_mb(psutil.Process(server.pid))
            finally:
                server.terminate()
                server.wait()
    finally:
        engine.terminate()
        engine.wait()
    report("serve", [at_most("polar serve, idle, engine elsewhere", memory, "MB", GOAL_MB)])


if __name__ == "__main__":
    main()
