"""The file that tells the clients of a data directory where its server listens."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def announced(data_dir: Path, url: str, certificate: Path | None) -> Iterator[None]:
    """Name the server in server.json while the body runs; of several in a directory the first is named."""
    with (data_dir / "server.lock").open("w") as lock:
        if not _is_first(lock):
            yield
            return
        address = data_dir / "server.json"
        shown = str(certificate.absolute()) if certificate else None
        address.write_text(json.dumps({"url": url, "pid": os.getpid(), "certificate": shown}))
        try:
            yield
        finally:
            address.unlink(missing_ok=True)


def _is_first(lock: TextIO) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks cannot tell, and most directories have one server.
        return True
    return True
