"""Disks of limited size: sparse ext4 images, formatted once for each size and mounted by a loop device."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from polar.runtimes.base import SandboxUnavailable

MS_NOSUID, MS_NODEV, MS_NOATIME = 2, 4, 1024
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
BLOCK_BYTES = 4096
FEATURES = "^has_journal,^resize_inode,^metadata_csum"
MOUNT_OPTIONS = b"nobarrier,noinit_itable"
"""Nobody wants these files back after a crash, so nothing ever waits for the real disk."""

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_AUTOCLEAR = 4
_CONFIGURATION = struct.Struct("=II40xIIII160x16x64x")
_ATTEMPTS = 100

libc = ctypes.CDLL(None, use_errno=True)


def has_tools() -> bool:
    return os.geteuid() == 0 and shutil.which("mkfs.ext4", path=SYSTEM_PATH) is not None


def mount_image(image: Path, target: Path, size: int) -> None:
    """A new empty file system of this size; `image` takes as much of the host's disk as is used of it."""
    with image.open("x+b") as file:
        file.truncate(size)
        for offset, data in _formatted(size):
            file.seek(offset)
            file.write(data)
        file.flush()
        device = _attach(file.fileno())
    try:
        with os.fdopen(device, "rb"):
            name = os.fsencode(os.readlink(f"/proc/self/fd/{device}"))
            flags = MS_NOSUID | MS_NODEV | MS_NOATIME
            if libc.mount(name, os.fsencode(target), b"ext4", flags, MOUNT_OPTIONS) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        raise SandboxUnavailable(f"the sandbox's disk could not be mounted: {error.strerror}") from None
    (target / "lost+found").rmdir()


@cache
def _formatted(size: int) -> tuple[tuple[int, bytes], ...]:
    """What is in a fresh image of this size and where; everything else in it is zero."""
    with tempfile.NamedTemporaryFile(prefix="polar-image-") as file:
        file.truncate(size)
        command = ["mkfs.ext4", "-q", "-F", "-b", str(BLOCK_BYTES), "-m", "0", "-O", FEATURES]
        command += ["-E", "lazy_itable_init=1,nodiscard"]
        try:
            done = subprocess.run(
                [*command, file.name], capture_output=True, text=True, env={"PATH": SYSTEM_PATH}, cwd="/"
            )
        except OSError as error:
            raise SandboxUnavailable(f"no disk can be formatted: {error}") from None
        if done.returncode != 0:
            raise SandboxUnavailable(f"no disk can be formatted: {done.stderr.strip()[:500]}")
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
    """An open loop device that shows the file, and lets it go when it is unmounted."""
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
                    # Somebody else was given the same one and was quicker.
                    if error.errno != errno.EBUSY:
                        raise
                else:
                    return device
    except OSError as error:
        raise SandboxUnavailable(f"no loop device for the sandbox's disk: {error.strerror}") from None
    raise SandboxUnavailable("no loop device is free for the sandbox's disk")
