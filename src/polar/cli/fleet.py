"""`polar fleet`: starts, shows and stops nodes on a Ray cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar.app.fleet.planning import FleetOrder, FleetView
from polar.cli import options
from polar.cli.options import AsJson, Server, Token, command_group
from polar.cli.output import print_json, print_parts, say, table
from polar.client.connection import server_address, server_token
from polar.config.settings import environment_ray_auth, load_settings
from polar.errors import InvalidInput

fleet = command_group(no_args_is_help=True)
Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="per-host|N|MIN..MAX",
        help="One node per machine (default), a fixed number, or a range that follows the queue.",
    ),
]
Resource = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=AMOUNT",
        help="Resources that a node reserves: CPU, GPU, memory or a custom one; repeat for several"
        " (default: CPU=1).",
    ),
]
NodesData = Annotated[
    Path | None, typer.Option(help="Data directory of the nodes on each machine (default: ~/.polar-fleet).")
]
Address = Annotated[str, typer.Option(help="The Ray cluster: auto, HOST:PORT or ray://HOST:PORT.")]
WaitSeconds = Annotated[
    float, typer.Option(min=0, help="Seconds to wait until nodes are ready, or have drained.")
]


@fleet.callback()
def about() -> None:
    """Run nodes on a Ray cluster, one a machine, for a rollout server. See docs/scale-out.md for recipes.

    Examples:

      polar fleet up --server http://trainer:8700 --engine-url http://gpu:8000 --nodes 1..8
      polar fleet status
      polar fleet down
    """


@fleet.command()
def up(
    address: Address = "auto",
    nodes: Nodes = None,
    resource: Resource = None,
    server: Server = None,
    token: Token = None,
    ca: options.Ca = None,
    config: options.ConfigFile = None,
    data_dir: NodesData = None,
    engine_url: options.EngineUrl = None,
    engine_kind: options.EngineKind = None,
    engine_mode: options.EngineMode = None,
    model: options.Model = None,
    run_slots: options.RunSlots = None,
    wait_seconds: WaitSeconds = 300.0,
    as_json: AsJson = False,
) -> None:
    """Start a fleet, whose nodes are then monitored, replaced and scaled; or resize a running one.

    The file of --ca must have the same path on every machine. Without --engine-url, each node starts its own
    engine.
    """
    from polar.app.fleet import control

    settings = load_settings(
        config,
        {
            "engine": {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode, "model": model},
            "node": {"run_slots": run_slots, "ca": ca},
            "fleet": {"nodes": nodes, "resources": _resources(resource), "data_dir": data_dir},
        },
    )
    url = server_address(server or settings.node.server)
    order = FleetOrder.of(settings, url, server_token(token or settings.server.token))
    _warn_of_open_cluster()
    with control.connected(address):
        _print(control.up(order, _FleetProgress(), wait_seconds=wait_seconds), as_json)


@fleet.command()
def status(address: Address = "auto", as_json: AsJson = False) -> None:
    """Show the nodes of the fleet."""
    from polar.app.fleet import control

    with control.connected(address):
        _print(control.status(), as_json)


@fleet.command()
def down(
    address: Address = "auto",
    wait_seconds: WaitSeconds = 300.0,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for running sessions.")] = False,
) -> None:
    """Drain every node, then stop the fleet."""
    from polar.app.fleet import control

    with control.connected(address):
        control.down(_FleetProgress(), wait_seconds=wait_seconds, now=now)
    say("the fleet is down")


def _warn_of_open_cluster() -> None:
    if environment_ray_auth() != "token":
        say(
            "warning: anyone who can reach this Ray cluster can run programs on its machines, without a token"
            " (RAY_AUTH_MODE=token; see docs/scale-out.md)",
            typer.colors.YELLOW,
        )


class _FleetProgress:
    def __init__(self) -> None:
        self._said = ""

    def __call__(self, view: FleetView) -> None:
        states = [f"{node.name} {node.state}" for node in view.nodes]
        line = f"{view.wanted} nodes wanted: {', '.join(states) or 'none yet'}"
        if view.looks and line != self._said:
            say(line)
            self._said = line


def _resources(given: list[str] | None) -> dict[str, float] | None:
    if not given:
        return None
    try:
        return {name: float(amount) for name, amount in (text.split("=") for text in given)}
    except ValueError:
        raise InvalidInput("--resource: must be NAME=AMOUNT, such as CPU=4") from None


def _print(view: FleetView, as_json: bool) -> None:
    if as_json:
        print_json(view)
        return
    rows = [(node.name, node.host, node.state, node.detail) for node in view.nodes]
    queue = "unknown" if view.unended is None else view.unended
    print_parts(
        table(["NODE", "HOST", "STATE", "DETAIL"], rows),
        f"nodes: {view.size}, {view.wanted} wanted, on {view.machines} machines",
        f"sessions queued or running: {queue} (at {view.server})",
    )
    if view.missing:
        print_parts(f"{view.missing} nodes are waiting for a machine with their resources")
    if view.trouble:
        say(f"trouble: {view.trouble}")
