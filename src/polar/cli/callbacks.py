"""`polar callbacks`: what tasks wanted told, how far that is, and another try for what was given up."""

from __future__ import annotations

import itertools
from enum import StrEnum
from typing import Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput


class Action(StrEnum):
    LIST = "list"
    RETRY = "retry"


def callbacks(
    action: Annotated[str, typer.Argument(metavar="[list|retry]")] = "list",
    callback_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="With retry: which.", show_default=False)
    ] = None,
    dead: Annotated[
        bool, typer.Option("--dead", help="Only those given up; with retry: all of them.")
    ] = False,
    task: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most so many.")] = 100,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List callbacks, newest first, or try some again.

    Examples:

      polar callbacks list --dead
      polar callbacks retry ID
      polar callbacks retry --dead --task fix-typo
    """
    from polar.cli.output import clock, print_json_line, print_parts, table
    from polar.models.callback import CallbackStatus

    doing = one_of(Action, action, "ACTION")
    if doing is Action.RETRY and (callback_id is None) == (not dead):
        raise InvalidInput("polar callbacks retry needs an ID, or --dead for all that were given up")
    status = CallbackStatus.DEAD if dead else None
    with connect(server, token) as client:
        if doing is Action.RETRY:
            ids = [callback_id] if callback_id else [view.id for view in client.callbacks(status, task)]
            views = [client.retry_callback(id) for id in ids]
        else:
            views = list(itertools.islice(client.callbacks(status, task), limit))
    if as_json:
        for view in views:
            print_json_line(view)
        return
    rows = [
        (
            view.id,
            view.status.value,
            view.event.value,
            view.session_id or view.task_id,
            view.url,
            view.attempts,
            clock(view.created_at),
            view.error,
        )
        for view in views
    ]
    columns = ("ID", "STATUS", "EVENT", "ABOUT", "URL", "ATTEMPTS", "MADE", "LAST ERROR")
    print_parts(table(columns, rows, numbers=("ATTEMPTS",)))
