"""Where log lines go: Polar's own at the configured level, libraries' from warnings on."""

from __future__ import annotations

import logging
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr(level: str) -> None:
    logging.basicConfig(level=logging.WARNING, format=FORMAT)
    logging.getLogger("polar").setLevel(level.upper())


def log_to_file(path: Path, level: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING, format=FORMAT, filename=path)
    logging.getLogger("polar").setLevel(level.upper())
