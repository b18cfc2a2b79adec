"""Runs a program, and ends it with all its children when the process that asked for it is gone.

Started as a file, `guard.py ASKER COMMAND…`, it imports nothing of Polar and stays small beside an engine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

STOP_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL."""
LOOK_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def guard(asker: int, command: Sequence[str]) -> int:
    """Run the program while the process `asker` exists; return the exit code as a shell gives it."""
    asked = False

    def ask(*_signal: object) -> None:
        nonlocal asked
        asked = True

    # Before there is a program: killed after that, this would leave behind what the program has started.
    signal.signal(signal.SIGTERM, ask)
    signal.signal(signal.SIGINT, ask)
    program = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_guard)
    while not asked and os.getppid() == asker and _is_running(program, LOOK_SECONDS):
        pass
    program.terminate()
    _is_running(program, STOP_SECONDS)
    # Its own processes are in its group, and may outlive it.
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    code = program.wait()
    return code if code >= 0 else 128 - code


def _is_running(program: subprocess.Popen[bytes], seconds: float) -> bool:
    with suppress(subprocess.TimeoutExpired):
        program.wait(seconds)
    return program.returncode is None


def _end_with_guard() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
