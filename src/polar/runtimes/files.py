"""File access below a directory that an agent could change: links are never followed."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from polar.runtimes.base import PathRefused, SandboxError, SandboxFull

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def write_file(
    base: Path | str, parts: Sequence[str], data: bytes, mode: int, owner: int | None = None
) -> None:
    """Write a file atomically for `owner`, creating its parents and replacing any link or file of its
    name."""
    *parents, name = parts
    with _naming_path(parts), _open_directory(base, parents, create=True, owner=owner) as directory:
        temporary = f".polar-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(temporary, flags, 0o600, dir_fd=directory)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                os.fchmod(stream.fileno(), mode)
                if owner is not None:
                    os.fchown(stream.fileno(), owner, owner)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(temporary, dir_fd=directory)
            raise


def read_file(base: Path | str, parts: Sequence[str], max_bytes: int) -> bytes:
    """Return the content of a regular file that is reached without any link."""
    *parents, name = parts
    shown = "/".join(parts)
    with _naming_path(parts), _open_directory(base, parents, create=False) as directory:
        # Non-blocking, so that a planted pipe cannot block us.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
        with os.fdopen(file, "rb") as stream:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise PathRefused(f"{shown}: not a regular file")
            data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise SandboxError(f"{shown}: larger than {max_bytes} bytes")
    return data


def remove_tree(path: Path) -> None:
    """Remove a file, or a directory of any depth and with any modes; nobody may be writing to it.

    Subdirectories are moved to the top before they are emptied, so depth costs neither stack nor long
    paths.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    path.chmod(0o700)
    top = os.open(path, _DIRECTORY)
    try:
        waiting = _empty(top, top)
        while waiting:
            name = waiting.pop()
            child = os.open(name, _DIRECTORY, dir_fd=top)
            try:
                waiting += _empty(child, top)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    path.rmdir()


def _empty(directory: int, top: int) -> list[str]:
    """Unlink the files of a directory, move its subdirectories to `top`, and return their names there."""
    moved = []
    with os.scandir(directory) as entries:
        for entry in list(entries):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=directory)
                continue
            os.chmod(entry.name, 0o700, dir_fd=directory)
            name = f".polar-{secrets.token_hex(8)}"
            os.rename(entry.name, name, src_dir_fd=directory, dst_dir_fd=top)
            moved.append(name)
    return moved


@contextmanager
def _open_directory(
    base: Path | str, parents: Sequence[str], *, create: bool, owner: int | None = None
) -> Iterator[int]:
    """Open the directory below `base`, walking one real directory at a time."""
    directory = os.open(base, _DIRECTORY)
    try:
        for name in parents:
            if create:
                # Opening it shows whether an existing entry is a directory.
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=directory)
                    if owner is not None:
                        os.chown(name, owner, owner, dir_fd=directory, follow_symlinks=False)
            below = os.open(name, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = below
        yield directory
    finally:
        os.close(directory)


@contextmanager
def _naming_path(parts: Sequence[str]) -> Iterator[None]:
    shown = "/".join(parts)
    try:
        yield
    except FileNotFoundError:
        raise SandboxError(f"{shown}: no such file") from None
    except (NotADirectoryError, IsADirectoryError, FileExistsError):
        raise PathRefused(f"{shown}: a link, file or directory is in the way") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SandboxFull(f"{shown}: no room left in the sandbox", hint="raise limits.disk") from None
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise PathRefused(f"{shown}: not a regular file, or reached through a link") from None
        raise SandboxError(f"{shown}: {error.strerror}") from None
