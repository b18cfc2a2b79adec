"""`polar audit`: who asked the server for what, and what became of it."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect


def audit(
    actor: Annotated[str | None, typer.Option(help="Only by the holder of this token's name.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this operation, such as submit_task.")] = None,
    about: Annotated[
        str | None, typer.Option("--object", help="Only about this task, session, node or token.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="30d|12h|600s", help="Only of the last so long.")
    ] = None,
    refused: Annotated[bool, typer.Option("--refused", help="Only what was refused.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 100,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Show the audit log, newest first; this needs an admin's token.

    It holds what changed something and everything that was refused, and never a secret. What nodes do
    for their sessions is in `polar sessions SESSION` instead, unless it was refused.

    Examples:

      polar audit --since 24h --refused
      polar audit --actor alice --action cancel_task --json
    """
    import time

    from polar.cli.durations import seconds
    from polar.cli.output import clock, print_json_line, print_parts, table

    begin = time.time() - seconds(since, "--since") if since is not None else None
    with connect(server, token) as client:
        found = client.audit(actor=actor, action=action, object=about, since=begin, refused=refused)
        entries = list(itertools.islice(found, limit))
    if as_json:
        for entry in entries:
            print_json_line(entry)
        return
    rows = [
        (
            clock(entry.at),
            entry.actor,
            entry.role.value if entry.role else None,
            entry.address,
            entry.action,
            entry.object,
            entry.status,
            entry.detail,
        )
        for entry in entries
    ]
    print_parts(table(("AT", "WHO", "ROLE", "FROM", "DID", "ABOUT", "STATUS", "WHY"), rows))
