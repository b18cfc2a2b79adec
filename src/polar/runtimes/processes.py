"""Identifies processes so that a reused pid is never mistaken for one of ours, and ends them reliably."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

SANDBOX_VARIABLE = "POLAR_SANDBOX"
"""The environment variable with the sandbox's root, by which stray processes are found."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, distinguished from any other that later has its pid."""

    pid: int
    start_time: int
    """The kernel's start time in clock ticks after boot."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Identify the process with this pid; None if there is none."""
        fields = _stat(pid)
        if not fields or fields[0] in (b"Z", b"X"):
            return None
        return cls(pid, int(fields[19]), Path("/proc/sys/kernel/random/boot_id").read_text().strip())

    def save(self, directory: Path) -> Path:
        path = directory / f"{self.pid}.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def load(cls, path: Path) -> ProcessIdentity | None:
        """Load an identity; None if the file is incomplete."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def end(self, grace: float) -> bool:
        """Send SIGTERM, then SIGKILL, if it is still this process; return whether it was running."""
        with pidfd(self.pid) as descriptor:
            if descriptor is None or ProcessIdentity.of(self.pid) != self:
                return False
            for number in (signal.SIGTERM, signal.SIGKILL):
                send_signal(descriptor, number)
                if select.select([descriptor], [], [], grace)[0]:
                    break
            return True


def end_strays(root: Path) -> int:
    """Kill every process whose environment names this sandbox; return how many there were."""
    ended = 0
    while found := sum(_end_if_of(root, int(name)) for name in os.listdir("/proc") if name.isdigit()):
        ended += found
    return ended


def _end_if_of(root: Path, pid: int) -> bool:
    with pidfd(pid) as descriptor:
        if descriptor is None or not has_variable(pid, SANDBOX_VARIABLE, str(root)):
            return False
        send_signal(descriptor, signal.SIGKILL)
        return bool(select.select([descriptor], [], [], 5.0)[0])


_BATCH = 256


def inside(init: ProcessIdentity) -> set[int]:
    """Return the running processes of a container except its first: those in its pid namespace or below."""
    namespace = _pid_namespace(init.pid)
    if namespace is None or ProcessIdentity.of(init.pid) != init:
        return set()
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) and fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
    found = {pid for pid in parents if _pid_namespace(pid) == namespace}
    # Processes in nested namespaces are found as descendants.
    while below := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= below
    return found - {init.pid}


def signal_inside(pids: set[int], init: ProcessIdentity, number: signal.Signals) -> None:
    """Signal those processes that still belong to the container once a pidfd is open."""
    waiting = sorted(pids)
    while waiting:
        # In batches: a node may have few descriptors and an agent many processes.
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        with ExitStack() as stack:
            held = {pid: stack.enter_context(pidfd(pid)) for pid in batch}
            # A shell that saw its child end before it was told itself would end as if all were well.
            for pid in sorted(inside(init)):
                if (descriptor := held.get(pid)) is not None:
                    send_signal(descriptor, number)


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process started with this environment variable."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # It ended, or belongs to another user.


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _stat(pid: int) -> list[bytes] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None


def send_signal(descriptor: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


@contextmanager
def pidfd(pid: int) -> Iterator[int | None]:
    """Open a handle that stays with this process even if its pid is reused."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
