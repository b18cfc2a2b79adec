"""`polar token`: tokens with a role and a name, for access to the server."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.table import Table

from polar.cli.options import AsJson, Server, Token, command_group
from polar.cli.output import clock, print_json, print_list, say, table
from polar.client import Client
from polar.errors import InvalidInput
from polar.models.access import TokenRole, TokenView

_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}

token = command_group(no_args_is_help=True)


@token.callback()
def about() -> None:
    """Make, list and revoke tokens; this needs an admin's.

    A token is printed once, alone on standard output: the server stores only its digest. The file `token` in
    the data directory is an admin token too, and is not listed.

    Roles: admin may do everything; trainer submits, cancels, reads and updates the policy; read-only reads;
    node leases sessions and delivers their results.

    Examples:

      polar token create --role trainer --name alice --expires 90d
      polar token revoke alice
    """


@token.command("list")
def list_tokens(as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """List tokens, without their secrets."""
    with Client(server, token) as client:
        print_list(client.tokens(), _token_table, as_json=as_json)


@token.command()
def create(
    role: Annotated[TokenRole, typer.Option(help="The permissions of its holder.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the holder in audit lines (default: the role).")
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="30d|12h|600s", help="Lifetime of the token (default: unlimited).")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Create a token and print it."""
    lifetime = _seconds(expires) if expires is not None else None
    with Client(server, token) as client:
        made = client.create_token(name or role.value, role, expires_seconds=lifetime)
    if as_json:
        print_json(made)
        return
    view = made.view
    end = f"until {clock(view.expires_at)}" if view.expires_at is not None else "until it is revoked"
    say(f"{view.role} token {view.name} ({view.id}), {end}; it is shown only once:")
    typer.echo(made.token)


@token.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of tokens, or the id of one.")],
    server: Server = None,
    token: Token = None,
) -> None:
    """Revoke a token, or all tokens of a name."""
    with Client(server, token) as client:
        ended = client.revoke_token(name)
    say(f"revoked {', '.join(f'{view.name} ({view.id})' for view in ended)}")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    if match is None:
        raise InvalidInput(f"--expires: {text!r} is not a duration", hint="use 90s, 15m, 12h or 30d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _token_table(views: Iterable[TokenView]) -> Table:
    rows = (
        (view.name, view.role, view.state, view.id, clock(view.created_at), clock(view.expires_at))
        for view in views
    )
    return table(["NAME", "ROLE", "STATE", "ID", "MADE", "EXPIRES"], rows)
