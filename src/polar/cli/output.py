"""What commands print: tables for people, JSON for scripts, errors as one line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from polar.errors import PolarError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

PIPED_WIDTH = 10_000
"""Wide enough that nothing is cut or wrapped where no person's terminal sets the width."""

_VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD),
}


def visible(text: str) -> str:
    """Text with control characters made visible: what a model or a server says must not drive a terminal."""
    return text.translate(_VISIBLE)


def fail(error: PolarError) -> NoReturn:
    typer.secho(f"error: {visible(str(error))}", fg=typer.colors.RED, err=True)
    raise typer.Exit(1)


@contextmanager
def concerning(subject: str) -> Iterator[None]:
    """Errors raised inside begin with what they are about."""
    try:
        yield
    except PolarError as error:
        if subject not in error.message:
            error.message = f"{subject}: {error.message}"
        raise


def console(*, stderr: bool = False) -> Console:
    """A console without colours, cuts or wraps unless a terminal is at the other end."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, emoji=False, width=None if stream.isatty() else PIPED_WIDTH)


def print_parts(*parts: RenderableType) -> None:
    """Print the parts; spaces that pad lines to a width are for terminals only."""
    out = console()
    if out.is_terminal:
        out.print(*parts, sep="\n", markup=False)
        return
    with out.capture() as capture:
        out.print(*parts, sep="\n", markup=False)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().split("\n")[:-1]))
    sys.stdout.flush()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> Table:
    """A plain table; the columns in `numbers` are aligned to the right, None is shown as a dash."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
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


def clock(seconds: float) -> str:
    """Unix seconds as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def print_json(value: Any) -> None:
    """One document, indented, on standard output."""
    import orjson

    _write(orjson.dumps(_plain(value), option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))


def print_json_line(value: Any) -> None:
    """One object of a list, on a line of its own."""
    import orjson

    _write(orjson.dumps(_plain(value), option=orjson.OPT_SERIALIZE_NUMPY))


def _plain(value: Any) -> Any:
    from pydantic import BaseModel

    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _write(data: bytes) -> None:
    sys.stdout.write(data.decode() + "\n")
    sys.stdout.flush()
