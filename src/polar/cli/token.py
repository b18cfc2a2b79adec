"""`polar token`: who may ask the server for what, by tokens with a role and a name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, command_group, connect, one_of, seconds
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polar.models.access import MadeToken, TokenView

token = command_group(no_args_is_help=True)


@token.callback()
def about() -> None:
    """Make, list and revoke tokens; this needs an admin's.

    A token is printed once, alone on standard output: the server keeps only its digest. What the file
    `token` of the data directory holds is an admin's token too, and is not in the list.

    Roles: admin may do everything; trainer submits, cancels, reads and updates the policy; read-only
    reads; node leases sessions and delivers their results.

    Examples:

      polar token create --role trainer --name alice --expires 90d
      polar token revoke alice
    """


@token.command("list")
def list_tokens(as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """List tokens, without the tokens themselves."""
    from polar.cli.output import print_json_line

    with connect(server, token) as client:
        views = client.tokens()
        if not as_json:
            _print(views)
            return
        for view in views:
            print_json_line(view)


@token.command()
def create(
    role: Annotated[
        str | None, typer.Option(metavar="admin|trainer|read-only|node", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What audit lines call its holder (default: the role).")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="30d|12h|600s", help="When it ends (default: never).")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Make a token and print it."""
    from polar.models.access import TokenRole

    lifetime = seconds(expires, "--expires") if expires is not None else None
    wanted = one_of(TokenRole, role, "--role")
    if wanted is None:
        raise InvalidInput("--role: say which", hint=f"one of {', '.join(TokenRole)}")
    with connect(server, token) as client:
        _hand_over(client.create_token(name or wanted.value, wanted, expires_seconds=lifetime), as_json)


@token.command()
def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A name, or the id of one token.", show_default=False)
    ],
    server: Server = None,
    token: Token = None,
) -> None:
    """End a token, or all tokens of a name."""
    with connect(server, token) as client:
        ended = client.revoke_token(name)
    typer.echo(f"revoked {', '.join(f'{view.name} ({view.id})' for view in ended)}", err=True)


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
