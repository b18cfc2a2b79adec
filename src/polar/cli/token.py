"""`polar token`: who may ask the server for what, by tokens with a role and a name."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polar.models.access import MadeToken, TokenView


class Action(StrEnum):
    LIST = "list"
    CREATE = "create"
    REVOKE = "revoke"


def token(
    action: Annotated[str, typer.Argument(metavar="list|create|revoke", show_default=False)],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="With revoke: a name, or the id of one token.",
            show_default=False,
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(metavar="admin|trainer|read-only|node", help="With create.", show_default=False),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="With create: what audit lines call its holder (default: the role)."),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="30d|12h|600s", help="With create: when it ends (default: never)."),
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Make, list and revoke tokens; this needs an admin's.

    A token is printed once, alone on standard output: the server keeps only its digest. What the file
    `token` of the data directory holds is an admin's token too, and is not in the list.

    Roles: admin may do everything; trainer submits, cancels, reads and updates the policy; read-only
    reads; node leases sessions and delivers their results.

    Examples:

      polar token create --role trainer --name alice --expires 90d
      polar token revoke alice
    """
    from polar.cli.durations import seconds
    from polar.cli.output import print_json_line
    from polar.models.access import Role

    doing = one_of(Action, action, "ACTION")
    lifetime = seconds(expires, "--expires") if expires is not None else None
    if doing is Action.REVOKE and target is None:
        raise InvalidInput("polar token revoke needs a NAME")
    with connect(server, token) as client:
        match doing:
            case Action.CREATE:
                wanted = one_of(Role, role, "--role")
                if wanted is None:
                    raise InvalidInput("--role: say which", hint=f"one of {', '.join(Role)}")
                given = name or target or wanted.value
                _hand_over(client.create_token(given, wanted, expires_seconds=lifetime), as_json)
            case Action.REVOKE:
                ended = client.revoke_token(str(target))
                typer.echo(f"revoked {', '.join(f'{view.name} ({view.id})' for view in ended)}", err=True)
            case _:
                views = client.tokens()
                if as_json:
                    for view in views:
                        print_json_line(view)
                else:
                    _print(views)


def _hand_over(made: MadeToken, as_json: bool) -> None:
    from polar.cli.output import clock, print_json

    if as_json:
        print_json(made)
        return
    view = made.view
    end = f"until {clock(view.expires_at)}" if view.expires_at is not None else "until it is revoked"
    typer.echo(f"{view.role.value} token {view.name} ({view.id}), {end}; it is shown this once:", err=True)
    typer.echo(made.token)


def _print(views: Iterable[TokenView]) -> None:
    from polar.cli.output import clock, print_parts, table

    rows = [
        (
            view.name,
            view.role.value,
            view.state.value,
            view.id,
            clock(view.created_at),
            clock(view.expires_at) if view.expires_at is not None else None,
        )
        for view in views
    ]
    print_parts(table(("NAME", "ROLE", "STATE", "ID", "MADE", "EXPIRES"), rows))
