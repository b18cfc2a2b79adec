"""`polar nodes`: the nodes of a server, and which of them are given work."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polar.models.dashboard import NodeOverview


class Action(StrEnum):
    DRAIN = "drain"
    RESUME = "resume"


def nodes(
    action: Annotated[
        str | None,
        typer.Argument(metavar="[drain|resume]", help="What to do; without it: show.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Of the node.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Show the nodes and how full they are, drain one, or resume it.

    A drained node is given no new sessions and finishes those that it holds. It stays drained, also when
    it is restarted, until it is resumed. Both need an admin's token. `polar node` starts a node.

    Examples:

      polar nodes
      polar nodes drain gpu-7
      polar nodes resume gpu-7
    """
    from polar.cli.output import print_json_line

    doing = one_of(Action, action, "ACTION")
    if doing is not None and name is None:
        raise InvalidInput(f"polar nodes {doing} needs the NAME of a node")
    with connect(server, token) as client:
        match doing:
            case None:
                found: Iterable[NodeOverview] = client.nodes()
            case Action.DRAIN:
                found = [client.drain_node(str(name))]
            case Action.RESUME:
                found = [client.resume_node(str(name))]
    if as_json:
        for node in found:
            print_json_line(node)
    else:
        _print(found)


def _print(found: Iterable[NodeOverview]) -> None:
    from polar.cli.output import print_parts, table, visible
    from polar.models.session import SessionStatus

    stages = (SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN)
    columns = [stage.value.upper() for stage in stages]
    rows = [
        (
            node.name,
            node.state,
            node.version,
            *(_filled(node.sessions.get(stage, 0), node.places.get(stage)) for stage in stages),
            visible(node.trouble or node.error or ""),
        )
        for node in found
    ]
    print_parts(table(["NODE", "STATE", "POLICY", *columns, "ERROR"], rows, numbers=["POLICY", *columns]))


def _filled(sessions: int, places: int | None) -> str:
    return str(sessions) if places is None else f"{sessions}/{places}"
