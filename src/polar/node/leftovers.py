"""What leases leave on a node when no result of theirs is stored: kept for inspection, then let go."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from polar.node.workshop import Workshop

log = logging.getLogger(__name__)


def let_go(shop: Workshop, at_work: Collection[str]) -> int:
    """Remove captures, logs and evaluators' files that are old and of no lease at work; how many."""
    before = time.time() - shop.settings.keep_orphans_hours * 3600
    count = 0
    for directory in (shop.captures_dir, shop.kept_dir, shop.sessions_dir):
        for path in directory.glob("*"):
            # A session's sandboxes have names that begin with its lease's.
            if path.name.startswith(tuple(at_work)):
                continue
            try:
                count += _let_go_one(path, before)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s is old and could not be removed: %s", path, error.strerror)
    return count


def _let_go_one(path: Path, before: float) -> bool:
    # A sandbox that has not been closed is its runtime's to remove, with its processes and mounts.
    if path.lstat().st_mtime >= before or (path / "pids").exists():
        return False
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return True
