"""What a command wrote: its whole, its end, and a report of it that a person can read."""

from __future__ import annotations

from polar.runtimes.base import ExecResult

REPORT_BYTES = 16 * 1024
"""How much of the end of stdout, and of stderr, goes into a report."""
REPORT_LIMIT = 60 * 1024
"""How many bytes a whole report may have; 64 KiB are kept of it."""


def text_of(result: ExecResult) -> str:
    """Everything it wrote; stderr after stdout, since how they were interleaved is not kept."""
    return f"{result.stdout.text()}\n{result.stderr.text()}"


def report_of(result: ExecResult) -> str:
    """Exit code, and the end of both streams."""
    streams = (("stdout", result.stdout), ("stderr", result.stderr))
    texts = ((name, output.text(REPORT_BYTES).rstrip()) for name, output in streams)
    return "\n".join(
        [f"exit code {result.exit_code}", *(f"--- {name}\n{text}" for name, text in texts if text)]
    )


def cut(text: str, limit: int = REPORT_LIMIT) -> str:
    """A text of about `limit` bytes at most that says how much is missing; valid whatever is in it."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return data.decode()
    return f"{data[:limit].decode(errors='ignore')}\n[{len(data) - limit} more bytes]"
