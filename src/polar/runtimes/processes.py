"""Processes named so that a recycled pid is never mistaken for one of ours, and their certain end."""

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
"""Names the sandbox's root in the environment of its processes, so that strays can be found."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process and nobody else that will ever have its pid."""

    pid: int
    start_time: int
    """Clock ticks after boot, as the kernel has it."""
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Who has this pid now; None if nobody has."""
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
        """None for a file that its writer did not finish."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def end(self, grace: float) -> bool:
        """SIGTERM, then SIGKILL, if it is still this process; whether it was alive."""
        with pidfd(self.pid) as descriptor:
            if descriptor is None or ProcessIdentity.of(self.pid) != self:
                return False
            for number in (signal.SIGTERM, signal.SIGKILL):
                send_signal(descriptor, number)
                if select.select([descriptor], [], [], grace)[0]:
                    break
            return True


def end_strays(root: Path) -> int:
    """Kill every process whose environment names this sandbox; how many there were."""
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
    """The live processes of a container other than its first: of its pid namespace, or below one of those."""
    namespace = _pid_namespace(init.pid)
    if namespace is None or ProcessIdentity.of(init.pid) != init:
        return set()
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) and fields[0] not in (b"Z", b"X"):
            parents[int(name)] = int(fields[1])
    found = {pid for pid in parents if _pid_namespace(pid) == namespace}
    # A nested namespace has another name, but its processes descend from ours.
    while below := {pid for pid, parent in parents.items() if parent in found and pid not in found}:
        found |= below
    return found - {init.pid}


def signal_inside(pids: set[int], init: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to those of the processes that still are the container's once we hold on to them."""
    waiting = sorted(pids)
    while waiting:
        # Not all at once: a node may have few descriptors and an agent many processes.
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        with ExitStack() as stack:
            held = {pid: stack.enter_context(pidfd(pid)) for pid in batch}
            for pid in inside(init):
                if (descriptor := held.get(pid)) is not None:
                    send_signal(descriptor, number)


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process began with this in its environment."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False  # Gone, or another user's.


def _pid_namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _stat(pid: int) -> list[bytes] | None:
    """The fields of a process's status from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None


def send_signal(descriptor: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(descriptor, number)


@contextmanager
def pidfd(pid: int) -> Iterator[int | None]:
    """A handle that stays with this process even if its pid is given to another."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)
