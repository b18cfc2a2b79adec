"""The writable files of a sandbox, on a file system of limited size where the node may mount one.

As root with loop devices, every sandbox gets a sparse ext4 image, which takes only the space it uses, up to
its limit. Elsewhere plain directories are used, and the supervisor watches their size. A snapshot's files
become the lower directory of an overlay on the image, or are copied.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from polar.runtimes.base import Host, SandboxError, SandboxSpec, SandboxUnavailable
from polar.runtimes.files import remove_tree

MS_NOSUID, MS_NODEV, MS_NOATIME = 2, 4, 1024
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
BLOCK_BYTES = 4096
FEATURES = "^has_journal,^resize_inode,^metadata_csum"
MOUNT_OPTIONS = "nobarrier,noinit_itable"
"""Nobody needs these files after a crash, so nothing ever waits for the real disk."""

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_CONFIGURATION = struct.Struct("=II40xIIII160x16x64x")
_ATTEMPTS = 100

libc = ctypes.CDLL(None, use_errno=True)


def mount_image(image: Path, target: Path, size: int) -> None:
    """Mount a new empty file system of this size; `image` takes only the space it uses."""
    with image.open("x+b") as file:
        file.truncate(size)
        for offset, data in _format_image(size):
            file.seek(offset)
            file.write(data)
        file.flush()
        device = _attach(file.fileno())
    with os.fdopen(device, "rb"):
        _mount(os.readlink(f"/proc/self/fd/{device}"), target, "ext4", MOUNT_OPTIONS)
    (target / "lost+found").rmdir()


def _mount(source: str, target: Path, kind: str, options: str) -> None:
    flags = MS_NOSUID | MS_NODEV | MS_NOATIME
    what = (source.encode(), os.fsencode(target), kind.encode())
    if libc.mount(*what, flags, os.fsencode(options)) != 0:
        problem = os.strerror(ctypes.get_errno())
        raise SandboxUnavailable(f"{target}: the sandbox's {kind} cannot be mounted: {problem}")


@cache
def _format_image(size: int) -> tuple[tuple[int, bytes], ...]:
    """Return the non-zero parts of a fresh image of this size, with their offsets."""
    with tempfile.NamedTemporaryFile(prefix="polar-image-") as file:
        file.truncate(size)
        command = ["mkfs.ext4", "-q", "-F", "-b", str(BLOCK_BYTES), "-m", "0", "-O", FEATURES]
        command += ["-E", "lazy_itable_init=1,nodiscard"]
        try:
            done = subprocess.run(
                [*command, file.name], capture_output=True, text=True, env={"PATH": SYSTEM_PATH}, cwd="/"
            )
        except OSError as error:
            raise SandboxUnavailable(f"cannot format a disk: {error}") from None
        if done.returncode != 0:
            raise SandboxUnavailable(f"cannot format a disk: {done.stderr.strip()[:500]}")
        return tuple(_extents(file.fileno()))


def _extents(descriptor: int) -> list[tuple[int, bytes]]:
    extents: list[tuple[int, bytes]] = []
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return extents
            raise
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        extents.append((start, os.pread(descriptor, end - start, start)))


def _attach(file: int) -> int:
    """Return an open loop device for the file, which detaches when it is unmounted."""
    configuration = _CONFIGURATION.pack(file, BLOCK_BYTES, 0, 0, 0, _AUTOCLEAR)
    try:
        with open("/dev/loop-control", "rb") as control:
            for _ in range(_ATTEMPTS):
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                device = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(device, _LOOP_CONFIGURE, configuration)
                except OSError as error:
                    os.close(device)
                    # Another process got the same device first.
                    if error.errno != errno.EBUSY:
                        raise
                else:
                    return device
    except OSError as error:
        raise SandboxUnavailable(f"no loop device for the sandbox's disk: {error.strerror}") from None
    raise SandboxUnavailable("no loop device is free for the sandbox's disk")


WRITABLE = ("workspace", "home", "tmp")
"""The directories below `files` that a sandbox's processes may write to."""
FILES, IMAGE, LAYERS = "files", "disk.img", "layers"
FULL_BYTES = 64 * 1024
"""A disk with less free space than this counts as full."""

SMALLEST_BYTES = 16 * 1024 * 1024
"""A smaller disk is useless to an agent, unless its task asks for it."""

PROBE_BYTES = 16 * 1024 * 1024

_MNT_DETACH = 2


def make_disk(spec: SandboxSpec, host: Host, size: int | None, owner: int | None) -> None:
    """Create the writable directories of a sandbox for `owner`, with the content of its base."""
    root = host.sandboxes / spec.name
    base = host.snapshots / spec.base if spec.base else None
    files = root / FILES
    files.mkdir(mode=0o755)
    if size is not None and can_mount_images():
        mount_image(root / IMAGE, files, fitting_size(size, free_bytes(root) - host.disk_reserve))
    for name in WRITABLE:
        target = files / name
        if base is None:
            target.mkdir(mode=0o755)
            if owner is not None:
                os.chown(target, owner, owner)
        elif can_mount_overlays():
            target.mkdir(mode=0o755)
            _mount_overlay(base / name, files / LAYERS / name, target)
        else:
            copy_tree(base / name, target)


def free_bytes(directory: Path) -> int:
    """Return the space free for this process on the file system of a directory that may not exist yet."""
    while not directory.exists():
        directory = directory.parent
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def fitting_size(size: int, room: int) -> int:
    """Halve `size`, since each size is formatted once, until it takes no more than `room` of the disk."""
    while size > max(room, SMALLEST_BYTES):
        size //= 2
    if size > room:
        raise SandboxUnavailable(
            "the disk is too full for a sandbox", hint="free some space, or lower node.disk_reserve_bytes"
        )
    return size


def remove_disk(root: Path) -> None:
    """Unmount and remove what is below `root`; no process may still use it."""
    unmount_below(root)
    (root / IMAGE).unlink(missing_ok=True)
    remove_tree(root / FILES)


def is_full(root: Path) -> bool:
    if not (root / IMAGE).exists():
        return False
    space = os.statvfs(root / FILES)
    return space.f_bavail * space.f_frsize < FULL_BYTES or space.f_favail == 0


def copy_files(root: Path, into: Path) -> None:
    try:
        into.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise SandboxError(f"{into}: a snapshot with this name already exists") from None
    for name in WRITABLE:
        copy_tree(root / FILES / name, into / name)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory with owners, modes, links and holes, sharing blocks where the file system can."""
    copied = subprocess.run(
        ["cp", "--archive", "--reflink=auto", "--sparse=auto", "--", source, target],
        capture_output=True,
        text=True,
    )
    if copied.returncode != 0:
        raise SandboxError(f"{source}: cannot be copied: {copied.stderr.strip()[:500]}")


@cache
def can_mount_images() -> bool:
    """Whether this process can mount a disk of limited size; tried once."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4", path=SYSTEM_PATH) is None:
        return False
    return _succeeds(lambda root, files: mount_image(root / IMAGE, files, PROBE_BYTES))


@cache
def can_mount_overlays() -> bool:
    """Whether this process can mount overlays; tried once."""

    def attempt(root: Path, files: Path) -> None:
        (root / "lower").mkdir()
        if can_mount_images():
            mount_image(root / IMAGE, files, PROBE_BYTES)
        (files / "merged").mkdir()
        _mount_overlay(root / "lower", files / LAYERS / "x", files / "merged")

    return os.geteuid() == 0 and _succeeds(attempt)


def mounts_below(directory: Path) -> list[Path]:
    """Return the mount points below a directory, the last mounted first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), line.split(" ")[4]))
        if point != directory and point.is_relative_to(directory):
            found.append(point)
    return found[::-1]


def unmount_below(directory: Path) -> None:
    for point in mounts_below(directory.resolve()):
        if libc.umount2(os.fsencode(point), 0) == 0:
            continue
        # Another process, such as a backup, still uses it: the mount disappears when that ends.
        if libc.umount2(os.fsencode(point), _MNT_DETACH) != 0:
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise SandboxError(f"{point}: cannot be unmounted: {os.strerror(number)}")


def _mount_overlay(lower: Path, layers: Path, target: Path) -> None:
    upper, work = layers / "upper", layers / "work"
    for directory in (upper, work):
        directory.mkdir(parents=True)
    below = lower.stat()
    os.chown(upper, below.st_uid, below.st_gid)
    upper.chmod(below.st_mode & 0o7777)
    options = f"lowerdir={_escape(lower)},upperdir={_escape(upper)},workdir={_escape(work)}"
    _mount("polar", target, "overlay", options)


def _escape(path: Path) -> str:
    return re.sub(r"([\\:,])", r"\\\1", str(path))


def _succeeds(attempt: Callable[[Path, Path], None]) -> bool:
    with tempfile.TemporaryDirectory(prefix="polar-probe-") as directory:
        root = Path(directory).resolve()
        files = root / FILES
        files.mkdir()
        try:
            attempt(root, files)
        except (OSError, SandboxError):
            return False
        finally:
            unmount_below(root)
    return True
