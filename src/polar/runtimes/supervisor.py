"""A separate program that runs each command in a process tree of which nothing is left behind.

It is started once per node as `python -I -S supervisor.py ORDERS`. Python takes longer to start than a
sandbox, and nearly all of a supervisor's memory is the interpreter's; so the first process waits at ORDERS, a
socket, and forks a supervisor for every order. It imports nothing of Polar and little of the standard
library, and ends when ORDERS closes.

An order is a message with descriptors. CONTROL is a socket to the sender; if it closes, the sender has died.
STDIN goes to the command; STDOUT and STDERR are the log files to which the supervisor copies the command's
output. REQUEST is a marshalled dictionary; the remaining files become the command's descriptors 3, 4, ….

Started as `supervisor.py CONTROL PID PORT...`, it instead listens on the loopback of a container's network
and sends the sockets to CONTROL. So neither a container nor its image needs anything for that, and none of
our programs runs inside.

A supervisor is the reaper of every orphan below it (PR_SET_CHILD_SUBREAPER), so a process that daemonises
becomes its child instead of escaping. It polls limits that no control group enforces.
"""

from __future__ import annotations

# Importing `signal` and `socket` themselves would double the start-up time.
import _signal as signal  # type: ignore[import-not-found]
import ctypes
import fcntl
import gc
import marshal
import os
import resource
import select
import sys
import time
from _socket import (
    AF_INET,
    AF_UNIX,
    CMSG_SPACE,
    MSG_CMSG_CLOEXEC,
    MSG_DONTWAIT,
    SCM_RIGHTS,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    SOL_SOCKET,
    socket,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 16384, 1 << 18
MNT_DETACH = 2
OPEN_TREE, MOVE_MOUNT = 428, 429
"""System calls, with the same numbers on every architecture."""
AT_FDCWD, AT_RECURSIVE, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x8000, 1, 4
STAGE = "/tmp"
SYSTEM = (
    "/bin/",
    "/dev/",
    "/etc/",
    "/lib/",
    "/lib32/",
    "/lib64/",
    "/libx32/",
    "/proc/",
    "/sbin/",
    "/sys/",
    "/usr/",
)
"""The directories whose mounts sandboxes are made from."""
WATCH_SECONDS, COUNT_SECONDS = 0.25, 0.5
PAGE = os.sysconf("SC_PAGE_SIZE")
MAX_DESCRIPTORS = 16
NICENESS = 5
"""Added to the niceness of commands, so that many agents do not starve gateway, engine or trainer."""
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def enter_closed_network() -> None:
    """Leave the host's network for one with only its own loopback."""
    if libc.unshare(CLONE_NEWNET) != 0:
        # Without privileges, a network namespace requires a user namespace around it.
        uid, gid = os.getuid(), os.getgid()
        check(libc.unshare(CLONE_NEWUSER), "cannot make a user namespace")
        maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
        for name, content in maps:
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)
        check(libc.unshare(CLONE_NEWNET), "cannot make a network namespace")
    import struct

    interface = socket(AF_INET, SOCK_STREAM)
    request = struct.pack("16sh22x", b"lo", 0)
    _, flags = struct.unpack("16sh22x", fcntl.ioctl(interface.fileno(), SIOCGIFFLAGS, request))
    fcntl.ioctl(interface.fileno(), SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", flags | IFF_UP))
    interface.close()


def send_descriptors(control: socket, message: str, *descriptors: int) -> None:
    numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    control.sendmsg([message.encode()], [(SOL_SOCKET, SCM_RIGHTS, numbers)])


def send_listeners(control: socket, ports: list[int]) -> None:
    """Listen inside the closed network and send the sockets to the host; there is no other way in or out."""
    listeners = []
    for port in ports:
        listener = socket(AF_INET, SOCK_STREAM)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        listeners.append(listener)
    send_descriptors(control, "listening", *(listener.fileno() for listener in listeners))
    for listener in listeners:
        listener.close()


def enter(pid: str, kind: str) -> None:
    """Enter a namespace of another process, unless it is ours already."""
    theirs = f"/proc/{pid}/ns/{kind}"
    if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{kind}"):
        return
    with open(theirs, "rb") as file:
        check(libc.setns(file.fileno(), 0), f"cannot enter the container's {kind} namespace")


def listen_in_container(control: socket, pid: str, ports: list[int]) -> None:
    try:
        # The network of a rootless engine belongs to its user namespace.
        for kind in ("user", "net"):
            enter(pid, kind)
        send_listeners(control, ports)
    except OSError as error:
        control.send(f"failed {error}".encode())


class CommandOutput:
    """One stream of the command, copied to its log up to a limit and discarded beyond it."""

    def __init__(self, log: int, limit: int) -> None:
        self.log = log
        self.limit = limit
        self.left = limit
        self.is_full = False
        self.pipe, self.command_end = os.pipe()
        os.set_blocking(self.pipe, False)

    def copy(self) -> bool:
        """Copy what is available; return False once the stream has ended or is empty."""
        try:
            data = os.read(self.pipe, 65536)
        except BlockingIOError:
            return False
        if data and not self.is_full:
            kept = data[: self.left]
            self.left -= len(kept)
            self.write(kept)
            if len(kept) < len(data):
                self.is_full = True
                self.write(f"\n[polar: output beyond {self.limit} bytes was discarded]\n".encode())
        return bool(data)

    def write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self.log, data) :]
        except OSError:
            self.is_full = True  # The disk is full: the command continues, its log ends here.


def system_mounts() -> int | None:
    """Return a mount namespace with the system's mounts alone; None without the right to make one.

    A sandbox begins with a copy of a namespace, which takes a lock of the whole kernel for as long as there
    are mounts to copy. The host's has the disk of every other sandbox.
    """
    ready, told = os.pipe()
    done, finish = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(finish)
        try:
            leave_other_mounts()
            os.write(told, b"1")
            os.read(done, 1)
        finally:
            os._exit(0)
    os.close(told)
    os.close(done)
    try:
        if not os.read(ready, 1):
            return None
        with open(f"/proc/{pid}/ns/mnt", "rb") as file:
            # Away from the numbers that a command's own descriptors get.
            return fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 200)
    finally:
        os.close(ready)
        os.close(finish)


def leave_other_mounts() -> None:
    root = os.stat("/")
    check(libc.unshare(CLONE_NEWNS), "cannot make a mount namespace")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "cannot make mounts private")
    with open("/proc/self/ns/mnt", "rb") as namespace:
        check(libc.setns(namespace.fileno(), 0), "cannot enter a mount namespace")
    if not os.path.samestat(root, os.stat("/")):
        raise OSError("this process has another root than its namespace")
    with open("/proc/self/mountinfo", "rb") as file:
        points = [line.split()[4].decode("unicode_escape").encode("latin-1") for line in file]
    for point in reversed(points):
        if point != b"/" and not f"{os.fsdecode(point)}/".startswith(SYSTEM):
            libc.umount2(point, MNT_DETACH)


def stage(sources: list[str], namespace: int | None) -> None:
    """Mount each source as STAGE/0, STAGE/1, … for this process, which could not reach it without root."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    trees = [libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(source), flags) for source in sources]
    for source, tree in zip(sources, trees, strict=True):
        check(min(tree, 0), source)
    if namespace is not None:
        check(libc.setns(namespace, CLONE_NEWNS), "cannot enter a mount namespace")
    check(libc.unshare(CLONE_NEWNS), "cannot make a mount namespace")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "cannot make mounts private")
    check(libc.mount(b"polar", STAGE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=0755,size=1m"), STAGE)
    for number, tree in enumerate(trees):
        place = f"{STAGE}/{number}"
        if os.path.isdir(f"/proc/self/fd/{tree}"):
            os.mkdir(place)
        else:
            os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
        moved = libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, place.encode(), MOVE_MOUNT_F_EMPTY_PATH)
        check(moved, sources[number])
        os.close(tree)


def become(user: int) -> None:
    """Give up root for good, keeping the standard streams accessible by name."""
    for descriptor in (0, 1, 2):
        os.fchown(descriptor, user, user)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def spawn(request: dict[str, Any], outputs: list[CommandOutput], inherited: list[int]) -> int:
    """Start the command in its own session, with its limits."""
    pid = os.fork()
    if pid:
        return pid
    argv = request["argv"]
    try:
        os.setsid()
        os.nice(NICENESS)
        for entrance in request["groups"]:
            with open(entrance, "w") as file:
                file.write("0")
        for name, wanted in request["limits"].items():
            kind = getattr(resource, f"RLIMIT_{name.upper()}")
            hard = resource.getrlimit(kind)[1]
            value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (value, value))
        for target, output in enumerate(outputs, start=1):
            os.dup2(output.command_end, target)
        # First moved away from the numbers they are to get.
        moved = [fcntl.fcntl(given, fcntl.F_DUPFD, 100) for given in inherited]
        for target, descriptor in enumerate(moved, start=3):
            os.dup2(descriptor, target)
            os.close(descriptor)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if request["staged"]:
            stage(request["staged"], request["namespace"])
        if request["user"] is not None:
            become(request["user"])
        os.chdir(request["cwd"])
        os.execvpe(argv[0], argv, request["env"])
    except (OSError, ValueError) as error:
        os.write(2, f"cannot run {os.fsdecode(argv[0])}: {error}\n".encode(errors="replace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


class Watch:
    """Checks periodically whether the command's processes or files exceed their limits."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.limits = request["watched"]
        self.directories = request["directories"]
        self.next_look = time.monotonic() + WATCH_SECONDS
        self.next_count = time.monotonic() + WATCH_SECONDS

    def exceeded(self) -> str | None:
        self.next_look = time.monotonic() + WATCH_SECONDS
        if "memory" in self.limits or "pids" in self.limits:
            pids = descendants()
            if len(pids) > self.limits.get("pids", len(pids)):
                return "pids"
            if "memory" in self.limits and sum(map(private_bytes, pids)) > self.limits["memory"]:
                return "memory"
        if "disk" in self.limits and time.monotonic() >= self.next_count:
            started = time.monotonic()
            used = sum(map(disk_bytes, self.directories))
            # A large tree is counted less often, to use at most a twentieth of the time.
            self.next_count = time.monotonic() + max(COUNT_SECONDS, 20 * (time.monotonic() - started))
            if used > self.limits["disk"]:
                return "disk"
        return None


def private_bytes(pid: int) -> int:
    """Return the memory of a process that it does not share with files."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            resident, shared = file.read().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * PAGE


def disk_bytes(directory: str) -> int:
    """Return the disk space of a directory; concurrent changes are counted next time."""
    used = 0
    waiting = [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    used += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            continue
    return used


def descendants() -> list[int]:
    """Return every process below this one, possibly except a child that is just starting."""
    children = children_of if os.path.exists(f"/proc/self/task/{os.getpid()}/children") else family_tree()
    found: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below = children(waiting.pop())
        found += below
        waiting += below
    return found


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        pass  # It has just ended.
    return found


def family_tree() -> Callable[[int], list[int]]:
    """Return all processes by parent, for kernels that do not list a process's children; this is costly."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b") ")[2].split()[:2]
        except OSError:
            continue  # It has just ended.
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(name))
    return lambda pid: children.get(pid, [])


class Supervision:
    """The life of a command, from its start until nothing of it is left."""

    def __init__(self, control: socket, request: dict[str, Any], inherited: list[int]) -> None:
        self.control = control
        self.is_wrapped = request["is_wrapped"]
        self.grace = request["grace"]
        self.outputs = [CommandOutput(log, request["output_limit"]) for log in (1, 2)]
        self.exit_code: int | None = None
        self.watch = Watch(request) if request["watched"] else None
        self.exceeded: str | None = None
        self.must_end_by = float("inf")
        self.wake, wake_end = os.pipe()
        for end in (self.wake, wake_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self.end_now)
        self.command = spawn(request, self.outputs, inherited)
        for output in self.outputs:
            os.close(output.command_end)

    def end_now(self, *_: object) -> None:
        self.must_end_by = 0.0

    def run(self) -> int:
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.wake, *(output.pipe for output in self.outputs)):
            poll.register(descriptor, select.POLLIN)
        while self.exit_code is None and time.monotonic() < self.must_end_by:
            wake_at = min(self.must_end_by, self.watch.next_look if self.watch else float("inf"))
            left = wake_at - time.monotonic()
            for descriptor, _ in poll.poll(None if left == float("inf") else max(left, 0.0) * 1000):
                self.attend(descriptor, poll)
            self.reap()
            if self.watch and self.exit_code is None and time.monotonic() >= self.watch.next_look:
                self.exceeded = self.watch.exceeded()
                if self.exceeded:
                    self.end_now()
        self.end_tree()
        for output in self.outputs:
            while output.copy():
                pass
        return -signal.SIGKILL if self.exit_code is None else self.exit_code

    def attend(self, descriptor: int, poll: select.poll) -> None:
        if descriptor == self.wake:
            os.read(self.wake, 4096)
        elif descriptor == self.control.fileno():
            if self.control.recv(64, MSG_DONTWAIT) == b"terminate":
                self.terminate()
            else:
                self.end_now()
        else:
            output = next(output for output in self.outputs if output.pipe == descriptor)
            if not output.copy():
                poll.unregister(descriptor)

    def terminate(self) -> None:
        """Ask all processes to end, except a wrapper (the sandbox's own process), which ends the rest."""
        self.must_end_by = min(self.must_end_by, time.monotonic() + self.grace)
        self.signal_all(signal.SIGTERM, {self.command} if self.is_wrapped else set())

    def end_tree(self) -> None:
        """Kill until no child is left, not even one that has just started."""
        while self.reap():
            self.signal_all(signal.SIGKILL, set())
            select.select([self.wake], [], [], 0.005)

    def reap(self) -> bool:
        """Reap ended children; return whether any are left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == self.command:
                    self.exit_code = os.waitstatus_to_exitcode(status)
                if pid == 0:
                    return True
        except ChildProcessError:
            return False

    def signal_all(self, number: int, spared: set[int]) -> None:
        for pid in descendants():
            if pid not in spared:
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue


def supervise(control: socket, request: dict[str, Any], inherited: list[int]) -> None:
    try:
        myself = os.pidfd_open(os.getpid())
        send_descriptors(control, f"began {os.getpid()}", myself)
        os.close(myself)
        check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "cannot become a subreaper")
        if ports := request["closed_network_ports"]:
            enter_closed_network()
            send_listeners(control, ports)
        supervision = Supervision(control, request, inherited)
        message = f"exit {supervision.run()} {supervision.exceeded or ''}"
    except OSError as error:
        message = f"failed {error}"
    try:
        control.send(message.encode(errors="replace"))
    except OSError:
        os._exit(1)  # The sender is gone, and so is the command.


def take_order(descriptors: list[int], namespace: int | None) -> None:
    os.setsid()
    control, stdin, stdout, stderr, request, *inherited = descriptors
    for target, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    with open(request, "rb") as file:
        wanted = {**marshal.load(file), "namespace": namespace}
    supervise(socket(AF_UNIX, SOCK_SEQPACKET, 0, control), wanted, inherited)


def main() -> None:
    orders = socket(AF_UNIX, SOCK_SEQPACKET, 0, int(sys.argv[1]))
    if len(sys.argv) > 2:
        return listen_in_container(orders, sys.argv[2], [int(port) for port in sys.argv[3:]])
    os.set_inheritable(orders.fileno(), False)
    # The kernel reaps ended supervisors: nobody here waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    namespace = system_mounts()
    gc.freeze()
    while True:
        message, ancillary, _, _ = orders.recvmsg(16, CMSG_SPACE(MAX_DESCRIPTORS * 4), MSG_CMSG_CLOEXEC)
        if not message:
            return None
        descriptors = [number for _, _, data in ancillary for number in memoryview(data).cast("i")]
        try:
            is_supervisor = os.fork() == 0
        except OSError:
            is_supervisor = False  # The sender notices that nobody accepted it.
        if is_supervisor:
            try:
                orders.close()
                take_order(descriptors, namespace)
            except Exception as error:
                os.write(2, f"the supervisor failed: {error!r}\n".encode(errors="replace"))
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
