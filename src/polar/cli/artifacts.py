"""`polar artifacts`: a session's logs, diff and kept files."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import Annotated

import typer

from polar.cli.options import Server, Token, connect
from polar.errors import InvalidInput, NotFound


def artifacts(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="An ended session's id.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Print this one.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Unpack them all into this new directory.", show_default=False),
    ] = None,
    server: Server = None,
    token: Token = None,
) -> None:
    """List what was kept of a session's files and logs, print one, or unpack them all.

    Kept are the logs of every command that ran in its sandbox, what its evaluator put aside, the
    agent's diff, and the workspace files that the task's `artifacts` name.

    Examples:

      polar artifacts SESSION
      polar artifacts SESSION logs/agent.stderr
      polar artifacts SESSION --out kept
    """
    from polar.cli.output import print_parts, table

    if name is not None and out is not None:
        raise InvalidInput("NAME prints one file, --out unpacks them all: give one or the other")
    with connect(server, token) as client:
        archive = zipfile.ZipFile(io.BytesIO(client.artifacts(session)))
    if name is not None:
        _print(archive, name, session)
    elif out is not None:
        _unpack(archive, out)
    else:
        rows = [(entry.filename, entry.file_size) for entry in archive.infolist()]
        print_parts(table(["NAME", "BYTES"], rows, numbers=["BYTES"]))


def _print(archive: zipfile.ZipFile, name: str, session: str) -> None:
    try:
        data = archive.read(name)
    except KeyError:
        raise NotFound(
            f"session {session} has no artifact {name!r}", hint=f"polar artifacts {session} lists them"
        ) from None
    if sys.stdout.isatty():
        # What an agent printed must not drive the terminal.
        from polar.cli.output import visible

        typer.echo(visible(data.decode("utf-8", "replace")), nl=False)
    else:
        sys.stdout.buffer.write(data)


def _unpack(archive: zipfile.ZipFile, out: Path) -> None:
    try:
        out.mkdir(parents=True)
    except FileExistsError:
        raise InvalidInput(f"--out: {out} exists already") from None
    except OSError as error:
        raise InvalidInput(f"--out: {out} cannot be made: {error.strerror}") from None
    archive.extractall(out)
    typer.echo(f"{len(archive.namelist())} files in {out}")
