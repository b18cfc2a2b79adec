"""`polar sessions` and `polar artifacts`: the attempts at tasks, how to stop one, and what each left."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, command_group, connect, one_of
from polar.errors import InvalidInput, NotFound

if TYPE_CHECKING:
    from polar.client import Client
    from polar.models.views import SessionView

sessions = command_group()
SessionId = Annotated[str, typer.Argument(metavar="SESSION", show_default=False)]


@sessions.callback(invoke_without_command=True)
def list_sessions(
    context: typer.Context,
    task: Annotated[str | None, typer.Option(help="Only sessions of this task.")] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help="Only those queued, init, ready, running, postrun, completed, failed or cancelled."
        ),
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List sessions, show the state of one, or cancel one.

    What a session's agent said and did is told by `polar show`, what it left by `polar artifacts`.

    Examples:

      polar sessions --task fix-typo --status failed
      polar sessions cancel SESSION
    """
    if context.invoked_subcommand is not None:
        return
    from polar.cli.output import print_json_line, print_parts
    from polar.cli.summary import session_table
    from polar.models.session import SessionStatus

    wanted = one_of(SessionStatus, status, "--status")
    with connect(server, token) as client:
        views = client.sessions(task_id=task, status=wanted)
        if not as_json:
            print_parts(session_table(views))
            return
        for view in views:
            print_json_line(view)


@sessions.command()
def show(session_id: SessionId, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the state of a session and what happened to it."""
    with connect(server, token) as client:
        _print(client.session(session_id), client, as_json)


@sessions.command()
def cancel(
    session_id: SessionId, as_json: AsJson = False, server: Server = None, token: Token = None
) -> None:
    """End a session's agent."""
    from polar.cli.output import print_parts
    from polar.cli.summary import cancellation

    with connect(server, token) as client:
        view = client.cancel_session(session_id)
        _print(view, client, as_json)
    if not as_json and (note := cancellation(view.status, {view.status: 1})):
        print_parts(f"\n{note}")


def _print(view: SessionView, client: Client, as_json: bool) -> None:
    from polar.cli.output import print_json, print_parts
    from polar.cli.summary import event_table, session_table

    if as_json:
        print_json(view)
    else:
        print_parts(session_table([view]), "", event_table(client.session_events(view.id)))


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
        _print_file(archive, name, session)
    elif out is not None:
        _unpack(archive, out)
    else:
        rows = [(entry.filename, entry.file_size) for entry in archive.infolist()]
        print_parts(table(["NAME", "BYTES"], rows, numbers=["BYTES"]))


def _print_file(archive: zipfile.ZipFile, name: str, session: str) -> None:
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
