"""Directories in the user's cache, created atomically by whichever process needs them first."""

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
    """A pinned download failed; the message says which, the hint what to do."""


def asset(name: str, make: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache; if it is missing, `make(empty directory)` fills it.

    If several processes ask, one makes it and the others wait. The directory appears by a rename, so a
    process that dies half-way leaves nothing that looks finished.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    if not _MAY_MAKE.get():
        raise NotInstalled(f"{name} is not in the cache", hint="it is downloaded on first use")
    target.parent.mkdir(parents=True, exist_ok=True)
    with locked(target.parent / f".{target.name}.lock"):
        if not target.is_dir():
            with atomic_directory(target) as part:
                make(part)
    return target


def lock_tag(lock: Path) -> str:
    """Return a tag for names in the cache that changes with the content of a lock file."""
    return hashlib.sha256(lock.read_bytes()).hexdigest()[:8]


@contextmanager
def without_making() -> Iterator[None]:
    """Raise NotInstalled instead of making assets, here and in threads that asyncio starts in the block."""
    token = _MAY_MAKE.set(False)
    try:
        yield
    finally:
        _MAY_MAKE.reset(token)


_PR_SET_PDEATHSIG = 1
# Looked up before any fork: the child may do no more than call it.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def run_tool(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, capturing its output, without standard input."""
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
