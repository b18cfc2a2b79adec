"""`polar policy`: shows and replaces the weights that engines sample with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar.cli.options import AsJson, Server, Token, command_group
from polar.cli.output import print_json, print_parts, table
from polar.client import Client
from polar.models.policy import PauseMode, PolicyView

policy = command_group()
Holder = Annotated[str, typer.Option(help="Name of the holder; only the holder of a pause can update.")]
Mode = Annotated[
    PauseMode,
    typer.Option(
        help="Whether running generations freeze (keep), finish first (drain), or are aborted and"
        " continued later (abort)."
    ),
]
Weights = Annotated[
    Path | None,
    typer.Argument(
        help="A directory of weights or a safetensors file. Default: the weights that the engines were"
        " started with."
    ),
]


@policy.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the policy's version, pause it, replace its weights, or resume it.

    Examples:

      polar policy
      polar policy update .polar/weights/step-10
      polar policy pause --mode drain --timeout 300
      polar policy resume
    """
    if context.invoked_subcommand is None:
        with Client(server, token) as client:
            _print(client.policy(), as_json)


@policy.command()
def pause(
    mode: Mode = PauseMode.KEEP,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds after which the pause ends by itself.")
    ] = 60.0,
    holder: Holder = "command-line",
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Pause sampling."""
    with Client(server, token) as client:
        _print(client.pause_policy(holder, mode, timeout_seconds=timeout), as_json)


@policy.command()
def update(
    path: Weights = None,
    version: Annotated[
        int | None, typer.Option(help="Version number of the weights. Default: the next.")
    ] = None,
    holder: Holder = "command-line",
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Replace the weights. No pause is needed, since engines pause while they load."""
    with Client(server, token) as client:
        _print(client.update_policy(path, version=version, holder=holder), as_json)


@policy.command()
def resume(as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """End any pause, even another holder's."""
    with Client(server, token) as client:
        _print(client.resume_policy(), as_json)


def _print(view: PolicyView, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    pause = "none"
    if view.is_paused:
        pause = f"{view.mode} by {view.holder}, {view.seconds_left or 0:.0f} s left"
    facts = [("version", view.version), ("weights", view.path or "the engines' own"), ("pause", pause)]
    if view.failure:
        facts.insert(1, (f"version {view.newest}", f"no node could load it: {view.failure}"))
    nodes = [
        (node.node, node.version, "settled" if node.is_settled else node.error or "on its way")
        for node in view.nodes
    ]
    print_parts(table(["POLICY", ""], facts), "", table(["NODE", "VERSION", "STATE"], nodes))
