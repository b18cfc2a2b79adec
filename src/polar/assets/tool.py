"""Runs pip and npm for a download, so that neither outlives the process that wanted it."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child may do no more than call it.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def run_tool(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end with its output captured and nothing to read."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=_end_with_parent if _LIBC is not None else None,
    )


def _end_with_parent() -> None:
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
