"""A copy of a data directory's state that can be taken while servers write, and put back elsewhere."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from polar.errors import Conflict, InvalidInput, NotFound, PolarError
from polar.files import atomic_directory, atomic_file
from polar.store.blobs import ARTIFACTS, RECORDINGS

DATABASE = "polar.db"
SECRETS = ("token", "webhook-secret")


def back_up(data_dir: Path, into: Path) -> None:
    """Copy a data directory's tasks, results, recordings, artifacts and secrets; all of it or nothing.

    The database is copied first, as it was at one moment: whatever recordings its results have were
    stored before them, and are copied after.
    """
    if not (data_dir / DATABASE).is_file():
        raise NotFound(f"there is no database in {data_dir}", hint="name its data directory")
    if into.exists():
        raise Conflict(f"{into} is there already", hint="name a directory to be made")
    try:
        with atomic_directory(into, mode=0o700, durable=True) as part:
            with (
                closing(sqlite3.connect(data_dir / DATABASE)) as source,
                closing(sqlite3.connect(part / DATABASE)) as target,
            ):
                source.backup(target)
            _copy_files(data_dir, part)
    except (OSError, sqlite3.Error) as error:
        raise PolarError(f"the backup {into} could not be made: {error}") from error


def restore(backup: Path, data_dir: Path) -> None:
    """Put a backup into a data directory that has no state yet."""
    if not (backup / DATABASE).is_file():
        raise NotFound(f"{backup} is not a backup: it holds no {DATABASE}")
    if (data_dir / DATABASE).exists():
        raise Conflict(f"{data_dir} has a database already", hint="choose another data_dir, or move it away")
    with closing(sqlite3.connect(backup / DATABASE)) as source:
        try:
            (verdict,) = source.execute("PRAGMA integrity_check").fetchone()
        except sqlite3.DatabaseError as error:
            verdict = str(error)
    if verdict != "ok":
        raise InvalidInput(f"{backup / DATABASE} is damaged: {verdict}")
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy_files(backup, data_dir)
        # Last, and at once: a directory that has a database has all that belongs to it.
        with atomic_file(data_dir / DATABASE, mode=0o600, durable=True) as part:
            shutil.copyfile(backup / DATABASE, part)
    except OSError as error:
        raise PolarError(f"{backup} could not be restored: {error.strerror}") from error


def _copy_files(source: Path, target: Path) -> None:
    for kind in (RECORDINGS, ARTIFACTS):
        if (source / kind).is_dir():
            shutil.copytree(
                source / kind,
                target / kind,
                ignore=shutil.ignore_patterns(".part-*"),
                copy_function=_copy_if_there,
                dirs_exist_ok=True,
            )
    for name in SECRETS:
        if (source / name).is_file():
            shutil.copy2(source / name, target / name)


def _copy_if_there(source: str, target: str) -> None:
    # A server may remove an expired blob while it is being copied.
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)
