"""The file that tells the clients of a data directory where its server listens."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from polar.errors import Conflict
from polar.files import locked, write_atomic


@contextmanager
def announced(data_dir: Path, url: str, certificate: Path | None) -> Iterator[None]:
    """Name the server in server.json while the body runs; of several in a directory the first is named."""
    with ExitStack() as stack:
        try:
            taken = Conflict(f"{data_dir} has a server already")
            stack.enter_context(locked(data_dir / "server.lock", busy=taken))
        except Conflict:
            yield
            return
        address = data_dir / "server.json"
        shown = str(certificate.absolute()) if certificate else None
        write_atomic(address, json.dumps({"url": url, "pid": os.getpid(), "certificate": shown}))
        stack.callback(address.unlink, missing_ok=True)
        yield
