"""`polar policy`: which weights the engines sample with, and how to replace them by hand."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.models.policy import PolicyView


class Action(StrEnum):
    PAUSE = "pause"
    UPDATE = "update"
    RESUME = "resume"


def policy(
    action: Annotated[
        str | None,
        typer.Argument(
            metavar="[pause|update|resume]", help="What to do; without it: show.", show_default=False
        ),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Argument(
            help="With update: a directory of weights, or a safetensors file. Default: the weights that the"
            " engines were started with.",
            show_default=False,
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="keep|drain|abort",
            help="With pause: whether generations under way freeze (keep, the default), end first (drain), or"
            " are broken off and continued later (abort).",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="With pause: when it ends by itself.")
    ] = 60.0,
    holder: Annotated[
        str, typer.Option(help="In whose name: only a pause's holder updates.")
    ] = "command-line",
    version: Annotated[
        int | None, typer.Option(help="With update: its version. Default: the next.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Show the policy's version, pause it, replace its weights, or resume it.

    An update needs no pause: engines freeze while they load. `resume` ends any pause, whoever holds it.

    Examples:

      polar policy
      polar policy update .polar/weights/step-10
      polar policy pause --mode drain --timeout 300
      polar policy resume
    """
    from polar.cli.output import print_json
    from polar.models.policy import PauseMode

    doing = one_of(Action, action, "policy")
    how = one_of(PauseMode, mode, "--mode") or PauseMode.KEEP
    if path is not None and doing is not Action.UPDATE:
        raise InvalidInput("PATH goes with update only")
    with connect(server, token) as client:
        match doing:
            case None:
                view = client.policy()
            case Action.PAUSE:
                view = client.pause_policy(holder, how, timeout_seconds=timeout)
            case Action.UPDATE:
                view = client.update_policy(path, version=version, holder=holder)
            case Action.RESUME:
                view = client.resume_policy()
    if as_json:
        print_json(view)
    else:
        _print(view)


def _print(view: PolicyView) -> None:
    from polar.cli.output import print_parts, table, visible

    pause = "none"
    if view.is_paused:
        pause = f"{view.mode} by {view.holder}, {view.seconds_left or 0:.0f} s left"
    facts = [
        ("version", view.version),
        ("weights", visible(view.path) if view.path else "the engines' own"),
        ("pause", pause),
    ]
    if view.failure:
        facts.insert(1, (f"version {view.newest}", f"no node could load it: {visible(view.failure)}"))
    nodes = [
        (node.node, node.version, "settled" if node.is_settled else visible(node.error or "on its way"))
        for node in view.nodes
    ]
    print_parts(table(["POLICY", ""], facts), "", table(["NODE", "VERSION", "STATE"], nodes))
