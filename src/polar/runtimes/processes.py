"""Processes named so that a recycled pid is never mistaken for one of ours, and their certain end."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
        return None if not fields or fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]), _boot_id())

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
        with _pidfd(self.pid) as descriptor:
            if descriptor is None or ProcessIdentity.of(self.pid) != self:
                return False
            for number in (signal.SIGTERM, signal.SIGKILL):
                _send(descriptor, number)
                if select.select([descriptor], [], [], grace)[0]:
                    break
            return True


def end_strays(root: Path) -> int:
    """Kill every process whose environment names this sandbox; how many there were."""
    mark = f"{SANDBOX_VARIABLE}={root}".encode()
    ended = 0
    while found := sum(_end_if_marked(int(name), mark) for name in os.listdir("/proc") if name.isdigit()):
        ended += found
    return ended


def _end_if_marked(pid: int, mark: bytes) -> bool:
    with _pidfd(pid) as descriptor:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False  # Gone, or another user's.
        if descriptor is None or mark not in environment:
            return False
        _send(descriptor, signal.SIGKILL)
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
            held = {pid: stack.enter_context(_pidfd(pid)) for pid in batch}
            for pid in inside(init):
                if (descriptor := held.get(pid)) is not None:
                    _send(descriptor, number)


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process began with this in its environment."""
    try:
        return f"{name}={value}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


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


def _send(descriptor: int, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return


@contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
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


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
