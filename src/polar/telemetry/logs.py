"""Log lines that name the session and task they are about, and never contain a secret.

Polar logs at the configured level, libraries from warnings up. Session and task travel in context
variables, so that a library's warning carries them too. Keys and bearer tokens are redacted.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_ABOUT: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("polar_log_about", default=())

_SECRET = re.compile(
    r"polar-[A-Za-z0-9_-]{43}"  # a session's key
    r"|polar_[0-9a-f]{12}_[0-9a-f]{64}"  # a token of the control plane
    r"|(?<=bearer )[A-Za-z0-9._~+/=-]{8,}"
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",  # a user and password in a URL
    re.IGNORECASE,
)
_REDACTED = "[secret]"
CONSOLE = "console"


@contextmanager
def about(*, session: str, task: str | None = None) -> Iterator[None]:
    """Attach these ids to lines logged in the block and in tasks that it starts."""
    ids = (("session", session), ("task", task))
    token = _ABOUT.set(tuple((name, id) for name, id in ids if id is not None))
    try:
        yield
    finally:
        _ABOUT.reset(token)


def note(*, session: str) -> None:
    """Attach a session to the rest of the current asyncio task, once a request's session is known."""
    if ("session", session) not in _ABOUT.get():
        _ABOUT.set((("session", session),))


def log_to_stderr(level: str, format: str = CONSOLE) -> None:
    _log_to(logging.StreamHandler(sys.stderr), level, format)


def log_to_file(path: Path, level: str, format: str = CONSOLE) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _log_to(logging.FileHandler(path), level, format)


def _log_to(handler: logging.Handler, level: str, format: str) -> None:
    handler.setFormatter(formatter(format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    logging.getLogger("polar").setLevel(level.upper())


def formatter(format: str) -> logging.Formatter:
    """Return the formatter for `console` (lines for people) or `json` (one object per line, for machines)."""
    return _ConsoleLines() if format == CONSOLE else _JsonLines()


class _ConsoleLines(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        ids = _ABOUT.get()
        # Most lines name their session themselves.
        if not ids or ids[0][1] in line:
            return line
        return f"{line} ({', '.join(f'{name} {id}' for name, id in ids)})"

    def format(self, record: logging.LogRecord) -> str:
        return _SECRET.sub(_REDACTED, super().format(record))


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **dict(_ABOUT.get()),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return _SECRET.sub(_REDACTED, json.dumps(line, ensure_ascii=False, default=str))
