"""Control groups (v1, v2 or both), one per sandbox, created below the group of this process.

The kernel then accounts for a sandbox's memory, processes and time as a whole, whatever its processes do, and
lists every one of them when they are to be killed.
"""

from __future__ import annotations

import hashlib
import os
import re
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from polar.runtimes.base import Limit, Limits, SandboxError
from polar.runtimes.processes import pidfd, send_signal

CONTROLLERS = {Limit.MEMORY: "memory", Limit.PIDS: "pids", Limit.CPU: "cpu"}
_MEMORY_TOLERANCE = 1 << 20
"""How far below its limit the memory of a group that reached it may be, since pages are counted in
batches."""
WITH_SWAP = ("memory.swap.max", "memory.memsw.limit_in_bytes")
"""Settings of kernels that account for swap; without them, no swap is available."""
PERIOD_MICROSECONDS = 100_000
END_SECONDS = 10.0
RECORD = "cgroups"
"""The file below a sandbox's root that lists its groups, so that a restarted node finds them."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    directory: Path
    is_v2: bool
    controllers: frozenset[str]

    @property
    def name(self) -> str:
        return "cgroup v2" if self.is_v2 else "cgroup v1"


@dataclass(frozen=True, slots=True)
class Cgroup:
    members: Mapping[Path, Hierarchy]

    @classmethod
    def make(cls, root: Path, limits: Limits, hierarchies: Iterable[Hierarchy] | None = None) -> Cgroup:
        found = usable_hierarchies() if hierarchies is None else hierarchies
        place = Path(node_name(root.parent), f"sandbox-{root.name}")
        members = {hierarchy.directory / place: hierarchy for hierarchy in found}
        (root / RECORD).write_text("".join(f"{path}\n" for path in members))
        try:
            for path, hierarchy in members.items():
                _make_group(path, hierarchy)
                for name, value in _settings(limits, hierarchy):
                    if name not in WITH_SWAP or (path / name).exists():
                        (path / name).write_text(value)
        except OSError as error:
            for path in members:
                remove_group(path)
            raise SandboxError(f"cannot set the sandbox's limits: {error}") from None
        return cls(members)

    @property
    def join_files(self) -> tuple[str, ...]:
        """The files to which a process writes 0 to join."""
        return tuple(str(path / "cgroup.procs") for path in self.members)

    @property
    def enforces(self) -> frozenset[Limit]:
        present = frozenset[str]().union(*(hierarchy.controllers for hierarchy in self.members.values()))
        return frozenset(limit for limit, controller in CONTROLLERS.items() if controller in present)

    def refusals(self) -> dict[Limit, int]:
        """Return how often the group's own limits refused memory or a process."""
        counts = {}
        for path, hierarchy in self.members.items():
            if "memory" in hierarchy.controllers:
                counts[Limit.MEMORY] = _own_memory_refusals(path, hierarchy.is_v2)
            if "pids" in hierarchy.controllers:
                counts[Limit.PIDS] = _count(path / "pids.events", "max")
        return counts

    def memory_kills(self) -> int:
        """Return how many of its processes were killed for lack of memory, its own or the machine's."""
        return sum(
            _memory_kills(path, hierarchy.is_v2)
            for path, hierarchy in self.members.items()
            if "memory" in hierarchy.controllers
        )

    def kill(self) -> None:
        for path in self.members:
            kill_group(path)

    def remove(self) -> None:
        for path in self.members:
            remove_group(path)
            # The node's group is removed with its last sandbox.
            with suppress(OSError):
                path.parent.rmdir()


def node_name(sessions_root: Path) -> str:
    """Return a name for a node's groups and containers that no other node uses."""
    return f"polar-{hashlib.sha256(os.fsencode(sessions_root.absolute())).hexdigest()[:12]}"


def recorded_groups(root: Path) -> list[Path]:
    """Return the groups listed in a sandbox's directory, limited to possible groups of that sandbox."""
    try:
        lines = (root / RECORD).read_text().splitlines()
    except OSError:
        return []
    name = f"sandbox-{root.name}"
    return [path for path in map(Path, lines) if path.name == name and (path / "cgroup.procs").is_file()]


def reap_groups(sessions_root: Path) -> None:
    """Kill and remove every group that a node with these sessions created below our own."""
    for hierarchy in usable_hierarchies():
        node = hierarchy.directory / node_name(sessions_root)
        for path in node.glob("sandbox-*"):
            remove_group(path)
        with suppress(OSError):
            node.rmdir()


def kill_group(path: Path) -> None:
    """Kill every process of a group and wait until none is left."""
    deadline = time.monotonic() + END_SECONDS
    while pids := _pids(path):
        if time.monotonic() > deadline:
            raise SandboxError(f"processes {pids} of {path} cannot be ended")
        with suppress(OSError):
            (path / "cgroup.kill").write_text("1")
        for pid in pids:
            _kill_member(pid, path)
        time.sleep(0.002)


def remove_group(path: Path) -> None:
    """Kill what is in a group and remove it, if it exists."""
    if not path.is_dir():
        return
    kill_group(path)
    deadline = time.monotonic() + END_SECONDS
    while path.is_dir():
        try:
            path.rmdir()
        except OSError as error:
            # A killed process leaves its group shortly after it disappears from the list.
            if time.monotonic() > deadline:
                raise SandboxError(f"{path}: cannot be removed: {error.strerror}") from None
            time.sleep(0.002)


@cache
def usable_hierarchies() -> tuple[Hierarchy, ...]:
    """Return the hierarchies in which this process may create groups; tried once."""
    try:
        own, mounts = Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    except OSError:
        return ()
    return tuple(filter(None, map(_probe_hierarchy, find_hierarchies(own, mounts))))


def find_hierarchies(own: str, mounts: str) -> Iterator[Hierarchy]:
    """Yield our place in each wanted hierarchy, from /proc/self/cgroup and /proc/self/mountinfo."""
    mounted = [_mount(line) for line in mounts.splitlines()]
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        is_v2 = names == ""
        wanted = set(CONTROLLERS.values())
        if not is_v2 and not wanted & set(names.split(",")):
            continue
        for kind, options, root, point in mounted:
            if kind != ("cgroup2" if is_v2 else "cgroup"):
                continue
            if not is_v2 and not set(names.split(",")) <= set(options):
                continue
            inside = path.removeprefix(root) if path.startswith(root) else ""
            directory = Path(point, inside.strip("/"))
            offered = names.split(",") if not is_v2 else _words(directory / "cgroup.controllers")
            if controllers := frozenset(wanted & set(offered)):
                yield Hierarchy(directory, is_v2, controllers)
            break


def _mount(line: str) -> tuple[str, list[str], str, str]:
    before, _, after = line.partition(" - ")
    fields, (kind, _, options) = before.split(), after.split()[:3]
    root, point = (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text) for text in fields[3:5])
    return kind, options.split(","), root, point


def _probe_hierarchy(hierarchy: Hierarchy) -> Hierarchy | None:
    """Return the hierarchy with the controllers of a probe group; None if no group can be created."""
    probe = hierarchy.directory / f"polar-probe-{os.getpid()}"
    try:
        if hierarchy.is_v2:
            _delegate(hierarchy)
        probe.mkdir()
        try:
            has = frozenset(
                name for name in hierarchy.controllers if (probe / _limit_file(name, hierarchy)).exists()
            )
        finally:
            probe.rmdir()
    except OSError:
        return None
    return Hierarchy(hierarchy.directory, hierarchy.is_v2, has) if has else None


def _limit_file(controller: str, hierarchy: Hierarchy) -> str:
    first = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us", "pids": "pids.max"}
    return f"{controller}.max" if hierarchy.is_v2 else first[controller]


def _delegate(hierarchy: Hierarchy) -> None:
    """Delegate the controllers. A v2 group that does so may hold no process, so this one moves to a leaf."""
    control = hierarchy.directory / "cgroup.subtree_control"
    missing = hierarchy.controllers - set(_words(control))
    if not missing:
        return
    wish = " ".join(f"+{name}" for name in sorted(missing))
    try:
        control.write_text(wish)
    except OSError:
        leaf = hierarchy.directory / "polar-node"
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text("0")
        control.write_text(wish)


def _make_group(path: Path, hierarchy: Hierarchy) -> None:
    while True:
        path.parent.mkdir(exist_ok=True)
        if hierarchy.is_v2:
            control = path.parent / "cgroup.subtree_control"
            control.write_text(" ".join(f"+{name}" for name in sorted(hierarchy.controllers)))
        try:
            return path.mkdir()
        except FileNotFoundError:
            continue  # The node's group was removed with its last sandbox just now.


def _settings(limits: Limits, hierarchy: Hierarchy) -> Iterator[tuple[str, str]]:
    if limits.memory is not None and "memory" in hierarchy.controllers:
        size = str(int(limits.memory))
        yield _limit_file("memory", hierarchy), size
        yield ("memory.swap.max", "0") if hierarchy.is_v2 else ("memory.memsw.limit_in_bytes", size)
    if limits.pids is not None and "pids" in hierarchy.controllers:
        yield "pids.max", str(limits.pids)
    if limits.cpus is not None and "cpu" in hierarchy.controllers:
        quota = max(1000, round(limits.cpus * PERIOD_MICROSECONDS))
        if hierarchy.is_v2:
            yield "cpu.max", f"{quota} {PERIOD_MICROSECONDS}"
        else:
            yield "cpu.cfs_period_us", str(PERIOD_MICROSECONDS)
            yield "cpu.cfs_quota_us", str(quota)


def _own_memory_refusals(path: Path, is_v2: bool) -> int:
    if is_v2:
        return _count(path / "memory.events", "oom")
    # v1 does not say whose memory was short, and some kernels do not count refusals (memory.failcnt).
    return _memory_kills(path, is_v2) if _has_reached_its_limit(path) else 0


def _has_reached_its_limit(path: Path) -> bool:
    """Whether a v1 group ever used nearly all its memory; if not, the machine ran short."""
    highest, limit = (_words(path / f"memory.{name}_in_bytes") for name in ("max_usage", "limit"))
    return not highest or not limit or int(highest[0]) + _MEMORY_TOLERANCE >= int(limit[0])


def _memory_kills(path: Path, is_v2: bool) -> int:
    return _count(path / ("memory.events" if is_v2 else "memory.oom_control"), "oom_kill")


def _pids(path: Path) -> list[int]:
    return [int(word) for word in _words(path / "cgroup.procs")]


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _count(path: Path, key: str) -> int:
    words = _words(path)
    return int(words[words.index(key) + 1]) if key in words else 0


def _kill_member(pid: int, path: Path) -> None:
    """Kill a process if it is still in the group once a pidfd is open: its pid may have been reused."""
    with pidfd(pid) as descriptor:
        if descriptor is not None and pid in _pids(path):
            send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], 0.1)
