"""`polar sessions`: the attempts at tasks, where each is, and how to stop one."""

from __future__ import annotations

from typing import Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput


def sessions(
    session_id: Annotated[
        str | None, typer.Argument(metavar="[SESSION]", help="Only this session.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only sessions of this task.")] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help="Only those queued, init, ready, running, postrun, completed, failed or cancelled."
        ),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel SESSION: end its agent.")] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List sessions, show the state of one, or cancel one.

    What a session's agent said and did is told by `polar show`, what it left by `polar artifacts`.

    Examples:

      polar sessions --task fix-typo --status failed
      polar sessions SESSION --cancel
    """
    from polar.cli.output import print_json, print_json_line, print_parts
    from polar.cli.summary import cancellation, event_table, session_table
    from polar.models.session import SessionStatus

    wanted = one_of(SessionStatus, status, "--status")
    if session_id is None and cancel:
        raise InvalidInput("--cancel needs the SESSION to cancel", hint="polar sessions SESSION --cancel")
    if session_id is not None and (wanted is not None or task is not None):
        raise InvalidInput("--task and --status choose from the list; they do not go with SESSION")
    with connect(server, token) as client:
        if session_id is not None:
            view = client.cancel_session(session_id) if cancel else client.session(session_id)
            if as_json:
                print_json(view)
            else:
                print_parts(session_table([view]), "", event_table(client.session_events(session_id)))
                if cancel and (note := cancellation(view.status, {view.status: 1})):
                    print_parts(f"\n{note}")
            return
        views = client.sessions(task_id=task, status=wanted)
        if as_json:
            for view in views:
                print_json_line(view)
        else:
            print_parts(session_table(views))
