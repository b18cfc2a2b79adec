"""`polar sessions` and `polar artifacts`: the attempts at tasks, how to stop one, and what each left."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from polar.cli.options import AsJson, Server, Token, command_group
from polar.cli.output import clock, counted, print_json, print_list, print_parts, table, visible
from polar.client import Client
from polar.errors import InvalidInput, NotFound
from polar.models.session import AgentEnd, Origin, SessionEvent, SessionStatus
from polar.models.task import TaskStatus
from polar.models.views import SessionView

sessions = command_group()
SessionId = Annotated[str, typer.Argument(metavar="SESSION")]


@sessions.callback(invoke_without_command=True)
def list_sessions(
    context: typer.Context,
    task: Annotated[str | None, typer.Option(help="Only sessions of this task.")] = None,
    status: Annotated[SessionStatus | None, typer.Option(help="Only sessions in this state.")] = None,
    run: Annotated[str | None, typer.Option(help="Only sessions of this run.")] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List sessions, show the state of one, or cancel one.

    What a session's agent said and did is told by `polar show`, what it left by `polar artifacts`.

    Examples:

      polar sessions --task fix-typo --status failed
      polar sessions --run quickstart
      polar sessions show SESSION
      polar sessions cancel SESSION
    """
    if context.invoked_subcommand is None:
        with Client(server, token) as client:
            found = list(client.sessions(task, status, run))
            if not found:
                # A name that nothing has is a mistake; without the answer it would look like patience.
                for ask, name in ((client.task, task), (client.run, run)):
                    if name is not None:
                        ask(name)
            print_list(found, session_table, as_json=as_json)


@sessions.command()
def show(session_id: SessionId, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the state of a session and what happened to it."""
    with Client(server, token) as client:
        _print(client.session(session_id), client, as_json)


@sessions.command()
def cancel(
    session_id: SessionId, as_json: AsJson = False, server: Server = None, token: Token = None
) -> None:
    """End a session's agent."""
    with Client(server, token) as client:
        view = client.cancel_session(session_id)
        _print(view, client, as_json)
    if not as_json and (note := cancellation(view.status, {view.status: 1})):
        print_parts(f"\n{note}")


def _print(view: SessionView, client: Client, as_json: bool) -> None:
    if as_json:
        print_json(view)
    else:
        print_parts(session_table([view]), "", event_table(client.session_events(view.id)))


def artifacts(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="An ended session's id.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Print this one.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Unpack them all into this new directory.")
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
    if name is not None and out is not None:
        raise InvalidInput("NAME prints one file, --out unpacks them all: give one or the other")
    with Client(server, token) as client:
        archive = zipfile.ZipFile(io.BytesIO(client.artifacts(session)))
    if name is not None:
        _print_file(archive, name, session)
    elif out is not None:
        _unpack(archive, out)
    else:
        rows = [(entry.filename, entry.file_size) for entry in archive.infolist()]
        print_parts(table(["NAME", ">BYTES"], rows))


def _print_file(archive: zipfile.ZipFile, name: str, session: str) -> None:
    try:
        data = archive.read(name)
    except KeyError:
        raise NotFound(
            f"session {session} has no artifact {name!r}", hint=f"polar artifacts {session} lists them"
        ) from None
    if sys.stdout.isatty():
        # What an agent printed must not drive the terminal.
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


def session_table(sessions: Iterable[SessionView]) -> Table:
    columns = ["SESSION", "TASK", ">SAMPLE", "STATUS", ">ATTEMPT", ">COMPLETIONS", ">TOKENS", ">REWARD"]
    rows = (
        (
            session.id,
            session.task_id,
            session.sample,
            session.status,
            session.attempt,
            session.progress.completions,
            session.progress.sampled_tokens,
            session.result.reward if session.result else None,
            _note(session),
        )
        for session in sessions
    )
    return table([*columns, "NOTE"], rows)


def _note(session: SessionView) -> str:
    """The session's origin, if another one, and state."""
    beginning = "" if session.origin is None else _beginning(session.origin)
    return "; ".join(filter(None, (beginning, _state(session))))


def _beginning(origin: Origin) -> str:
    kind = "branch" if origin.samples_on else "replay"
    calls = "" if origin.calls is None else f" after {counted(origin.calls, 'call')}"
    return f"{kind} of {origin.session_id}{calls}"


def _state(session: SessionView) -> str:
    result = session.result
    if result is None:
        return f"on {session.node}" if session.node else ""
    has_failed = result.agent_end is AgentEnd.EXITED and result.exit_code
    return result.error or f"agent {result.agent_end}" + (f" with {result.exit_code}" if has_failed else "")


def event_table(events: Sequence[SessionEvent]) -> Table:
    """One session's events, and the seconds between them."""
    rows = (
        (
            event.attempt,
            event.status,
            clock(event.at),
            f"{after.at - event.at:.1f}" if after else None,
            event.node,
            event.detail,
        )
        for event, after in zip_longest(events, events[1:])
    )
    return table([">ATTEMPT", "STATUS", "AT", ">SECONDS", "NODE", "DETAIL"], rows)


def cancellation(status: TaskStatus | SessionStatus, sessions: Mapping[SessionStatus, int]) -> str | None:
    """The message after cancelling a task or session; None if its status says it all."""
    unended = sum(count for status, count in sessions.items() if not status.ended)
    if unended:
        ending = "session is" if unended == 1 else "sessions are"
        return f"{unended} {ending} being cancelled: nodes hear of it within seconds and end the agents"
    return None if status == SessionStatus.CANCELLED else "nothing was cancelled: it had ended already"
