"""Removes the files of leases that ended without a stored result, after a while for inspection."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from polar.node.services import NodeServices

log = logging.getLogger(__name__)


def remove_expired(services: NodeServices, at_work: Collection[str]) -> int:
    """Remove captures, logs and evaluators' files that are old and of no running lease; return how many."""
    before = time.time() - services.settings.keep_orphans_hours * 3600
    count = 0
    host = services.host
    for directory in (services.captures_dir, services.kept_dir, host.logs, host.sandboxes):
        for path in directory.glob("*"):
            # A session's sandboxes have names that begin with its lease's.
            if path.name.startswith(tuple(at_work)):
                continue
            try:
                count += _remove_if_expired(path, before)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s is old and could not be removed: %s", path, error.strerror)
    return count


def _remove_if_expired(path: Path, before: float) -> bool:
    # A sandbox that has not been closed is its runtime's to remove, with its processes and mounts.
    if path.lstat().st_mtime >= before or (path / "pids").exists():
        return False
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True
