"""Directories in the user's cache that are made once, whole or not at all, whoever asks first."""

from __future__ import annotations

import ctypes
import hashlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from polar.config.settings import cache_dir
from polar.errors import NotInstalled, PolarError
from polar.files import atomic_directory, locked

_MAY_MAKE: ContextVar[bool] = ContextVar("polar_assets_may_be_made", default=True)


class DownloadFailed(PolarError):
    """Something pinned could not be fetched; the message says which, the hint what to do."""


def asset(name: str, make: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache, filled by `make(empty directory)` if it is not there yet.

    Several processes may ask at once: one makes it, the others wait. The directory appears by a
    rename, so a process that dies half-way leaves nothing that looks finished.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    if not _MAY_MAKE.get():
        raise NotInstalled(f"{name} is not in the cache", hint="it is fetched when it is first needed")
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.lock"):
        if not target.is_dir():
            with atomic_directory(target) as part:
                make(part)
    return target


def lock_tag(lock: Path) -> str:
    """For names in the cache: what a lock file lists, so that another list is another directory."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()[:8]


@contextmanager
def without_making() -> Iterator[None]:
    """In the block, also in threads that asyncio starts from it, what is not there is NotInstalled."""
    token = _MAY_MAKE.set(False)
    try:
        yield
    finally:
        _MAY_MAKE.reset(token)


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
