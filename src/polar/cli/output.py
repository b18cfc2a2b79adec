"""Output of commands: tables for people, JSON for scripts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
import typer
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

Item = TypeVar("Item")

PIPED_WIDTH = 10_000
"""Wide enough that nothing is cut or wrapped if output is not a terminal."""

_VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}


def visible(text: str) -> str:
    """Make control characters visible, so that output of a model or server cannot control the terminal."""
    return text.translate(_VISIBLE)


def say(text: str, colour: str | None = None) -> None:
    typer.secho(visible(text), fg=colour, err=True)


def console(*, stderr: bool = False) -> Console:
    """Return a console without colours, cuts or wraps unless output is a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, emoji=False, width=None if stream.isatty() else PIPED_WIDTH)


@contextmanager
def session_progress(total: int) -> Iterator[tuple[Console, Callable[[int, str], None]]]:
    """Show a progress bar; the yielded function takes the number of ended sessions and a note."""
    terminal = console(stderr=True)
    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("sessions"), BarColumn(), MofNCompleteColumn(), note, TimeElapsedColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bar = progress.add_task("", total=total, note="")

        def update(ended: int, note: str) -> None:
            # The number of branches is only known as sessions end.
            progress.update(bar, completed=ended, total=max(total, ended), note=note)

        yield terminal, update


def print_parts(*parts: RenderableType) -> None:
    """Print the parts, padded with spaces only in a terminal."""
    out = console()
    if out.is_terminal:
        out.print(*parts, sep="\n", markup=False)
        return
    with out.capture() as capture:
        out.print(*parts, sep="\n", markup=False)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().split("\n")[:-1]))
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Build a plain table; columns named >NAME are right-aligned, and None is shown as a dash."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        is_number = column.startswith(">")
        made.add_column(column.lstrip(">"), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell(value)) for value in row))
    return made


def cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case float():
            return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        case _:
            return visible(str(value))


def clock(seconds: float | None) -> str | None:
    """Format Unix seconds as local time."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def print_list(
    items: Iterable[Item], shown: Callable[[Iterable[Item]], RenderableType], *, as_json: bool
) -> None:
    """Print items as a table, or as one JSON object per line as they arrive."""
    if not as_json:
        print_parts(shown(items))
        return
    for item in items:
        print_json_line(item)


def print_json(value: Any) -> None:
    _print_json(value, orjson.OPT_INDENT_2)


def print_json_line(value: Any) -> None:
    _print_json(value, 0)


def _print_json(value: Any, option: int) -> None:
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    sys.stdout.write(orjson.dumps(plain, option=option | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
    sys.stdout.flush()
