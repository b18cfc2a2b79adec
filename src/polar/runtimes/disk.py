"""The writable files of a sandbox: a file system of limited size where the node may mount one.

As root with loop devices, every sandbox gets a sparse ext4 image: it takes the space that is used,
and ends where its limit is. Elsewhere plain directories are used, and the supervisor looks how full
they are. A snapshot's files are laid under the image's as the lower directory of an overlay, or copied.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from polar.runtimes.base import Host, SandboxError, SandboxSpec, SandboxUnavailable
from polar.runtimes.files import remove_tree
from polar.runtimes.images import MS_NOATIME, MS_NODEV, MS_NOSUID, has_tools, libc, mount_image

WRITABLE = ("workspace", "home", "tmp")
"""The directories that a sandbox's processes may write to, below `files`."""
FILES, IMAGE, LAYERS = "files", "disk.img", "layers"
FULL_BYTES = 64 * 1024
"""A disk with less room than this is full to whoever wants to write."""

SMALLEST_BYTES = 16 * 1024 * 1024
"""A disk with less is of no use to an agent, unless its task asks for less."""

PROBE_BYTES = 16 * 1024 * 1024

_MNT_DETACH = 2


def make_disk(spec: SandboxSpec, host: Host, size: int | None, owner: int | None) -> None:
    """Lay out the writable directories of a sandbox, belonging to `owner` and holding what its base does."""
    root = host.sandboxes / spec.name
    base = host.snapshots / spec.base if spec.base else None
    files = root / FILES
    files.mkdir(mode=0o755)
    if size is not None and can_mount_images():
        mount_image(root / IMAGE, files, fitting(size, free_bytes(root) - host.disk_reserve))
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
    """What is free for this process on the file system of a directory that may not be there yet."""
    while not directory.exists():
        directory = directory.parent
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize


def fitting(size: int, room: int) -> int:
    """The size of a sparse image that can be filled without taking more than `room` of the host's disk.

    Halved until it fits: an image of each size is formatted once.
    """
    while size > max(room, SMALLEST_BYTES):
        size //= 2
    if size > room:
        raise SandboxUnavailable(
            "the disk is too full for a sandbox", hint="free some, or lower node.disk_reserve_bytes"
        )
    return size


def remove_disk(root: Path) -> None:
    """Unmount what is mounted below `root` and remove it; no process may use it any more."""
    unmount_below(root)
    (root / IMAGE).unlink(missing_ok=True)
    remove_tree(root / FILES)


def is_full(root: Path) -> bool:
    """Whether a sandbox of limited size has no room left."""
    if not (root / IMAGE).exists():
        return False
    space = os.statvfs(root / FILES)
    return space.f_bavail * space.f_frsize < FULL_BYTES or space.f_favail == 0


def keep(root: Path, into: Path) -> None:
    """Copy the writable directories into a new directory."""
    try:
        into.mkdir(parents=True, mode=0o700)
    except FileExistsError:
        raise SandboxError(f"{into}: a snapshot needs a new directory") from None
    for name in WRITABLE:
        copy_tree(root / FILES / name, into / name)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory with owners, modes, links and holes; shares blocks where the file system can."""
    copied = subprocess.run(
        ["cp", "--archive", "--reflink=auto", "--sparse=auto", "--", source, target],
        capture_output=True,
        text=True,
    )
    if copied.returncode != 0:
        raise SandboxError(f"{source}: could not be copied: {copied.stderr.strip()[:500]}")


@cache
def can_mount_images() -> bool:
    """Whether this process can make a disk of limited size; tried once for real."""
    return has_tools() and _succeeds(lambda root, files: mount_image(root / IMAGE, files, PROBE_BYTES))


@cache
def can_mount_overlays() -> bool:
    """Whether this process can lay one directory over another; tried once for real."""

    def attempt(root: Path, files: Path) -> None:
        (root / "lower").mkdir()
        if can_mount_images():
            mount_image(root / IMAGE, files, PROBE_BYTES)
        (files / "merged").mkdir()
        _mount_overlay(root / "lower", files / LAYERS / "x", files / "merged")

    return os.geteuid() == 0 and _succeeds(attempt)


def mounts_below(directory: Path) -> list[Path]:
    """Where something is mounted below a directory, the last mounted first."""
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
        # Held by a process of someone else's, such as a backup: it loses the mount when it lets go.
        if libc.umount2(os.fsencode(point), _MNT_DETACH) != 0:
            number = ctypes.get_errno()
            if number != errno.EINVAL:
                raise SandboxError(f"{point}: could not be unmounted: {os.strerror(number)}")


def _mount_overlay(lower: Path, layers: Path, target: Path) -> None:
    upper, work = layers / "upper", layers / "work"
    for directory in (upper, work):
        directory.mkdir(parents=True)
    below = lower.stat()
    os.chown(upper, below.st_uid, below.st_gid)
    upper.chmod(below.st_mode & 0o7777)
    options = f"lowerdir={_escaped(lower)},upperdir={_escaped(upper)},workdir={_escaped(work)}"
    flags = MS_NOSUID | MS_NODEV | MS_NOATIME
    if libc.mount(b"polar", os.fsencode(target), b"overlay", flags, os.fsencode(options)) != 0:
        raise SandboxUnavailable(
            f"{target}: a snapshot could not be laid under it: {os.strerror(ctypes.get_errno())}"
        )


def _escaped(path: Path) -> str:
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
