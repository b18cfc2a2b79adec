"""Where log lines go."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format=FORMAT)
    logging.getLogger("httpx").setLevel(logging.WARNING)


def log_to_file(path: Path, level: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=level.upper(), format=FORMAT, filename=path)
    logging.getLogger("httpx").setLevel(logging.WARNING)
