"""`polar node` runs a node for a server elsewhere; `polar nodes` lists and drains a server's nodes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from polar.cli import options
from polar.cli.interruption import exit_with_parent as watch_parent
from polar.cli.interruption import until_interrupted
from polar.cli.options import AsJson, Server, Token, command_group
from polar.cli.output import print_list, table
from polar.client import Client
from polar.config.settings import Settings, load_settings, machine_name
from polar.models.dashboard import NodeOverview
from polar.models.session import SessionStatus
from polar.telemetry.logs import log_to_stderr

if TYPE_CHECKING:
    from polar.app.stack import JoinedNode

NodeName = Annotated[
    str | None, typer.Option("--name", help="The node's name on the server (default: this machine's name).")
]
DrainSeconds = Annotated[
    float | None,
    typer.Option(help="Seconds that running agents get to finish when the node stops (default: 60)."),
]
MetricsPort = Annotated[
    int | None, typer.Option(help="Serve /metrics at this port; 0 picks a free one (default: not served).")
]


def node(
    server: Server = None,
    token: Token = None,
    ca: options.Ca = None,
    config: options.ConfigFile = None,
    data_dir: options.DataDir = None,
    name: NodeName = None,
    engine_url: options.EngineUrl = None,
    engine_kind: options.EngineKind = None,
    engine_mode: options.EngineMode = None,
    model: options.Model = None,
    run_slots: options.RunSlots = None,
    nodes: options.NodeCount = None,
    drain_seconds: DrainSeconds = None,
    metrics_port: MetricsPort = None,
    log_format: options.LogFormat = None,
    exit_with_parent: options.ExitWithParent = False,
    pin: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Join a rollout server and run its sessions on this machine.

    The first Ctrl-C or SIGTERM drains the node: it takes no new sessions, and running agents may finish;
    sessions that exceed the drain time return to the queue. The second stops it at once.

    Use a token with the role node: polar token create --role node. It is read from $POLAR_TOKEN or a file, so
    that it does not appear in process lists.

    Example: polar node --server http://trainer:8700 --token-file node.token --engine-url http://gpu:8000
    """
    if exit_with_parent:
        watch_parent()
    settings = load_settings(
        config,
        {
            "data_dir": data_dir,
            "server": {"token": token},
            "engine": {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode, "model": model},
            "node": {
                "server": server,
                "ca": ca,
                "name": name,
                "run_slots": run_slots,
                "count": nodes,
                "drain_seconds": drain_seconds,
            },
            "telemetry": {"metrics_port": metrics_port},
            "log_format": log_format,
        },
    )
    if "name" not in settings.node.model_fields_set:
        settings = settings.updated(node={"name": machine_name()})
    log_to_stderr(settings.log_level, settings.log_format)
    _run(settings, pin, has_parent=exit_with_parent)


def _run(settings: Settings, pin: Path | None, *, has_parent: bool) -> None:
    from polar.app.stack import join_server

    at_work: list[JoinedNode] = []

    def drain() -> bool:
        for worker in at_work:
            worker.node.drain()
        return bool(at_work)

    async def work() -> None:
        server, token = settings.node.server, settings.server.token
        async with join_server(settings, server, token, typer.echo, pin=pin) as worker:
            at_work.append(worker)
            typer.echo(f"ready as {settings.node.name} with {worker.model.name}")
            await worker.node.run()

    until_interrupted(work(), drain=drain, has_parent=has_parent)


nodes = command_group()
Name = Annotated[str, typer.Argument(metavar="NAME", help="The node's name.")]


@nodes.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the nodes and how full they are, drain one, or resume it.

    A drained node gets no new sessions and finishes its current ones. It stays drained, even across
    restarts, until it is resumed. Draining and resuming need an admin token. `polar node` starts a node.

    Examples:

      polar nodes
      polar nodes drain gpu-7
      polar nodes resume gpu-7
    """
    if context.invoked_subcommand is None:
        with Client(server, token) as client:
            print_list(client.nodes(), node_table, as_json=as_json)


@nodes.command()
def drain(name: Name, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Stop giving sessions to a node."""
    with Client(server, token) as client:
        print_list([client.drain_node(name)], node_table, as_json=as_json)


@nodes.command()
def resume(name: Name, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Give sessions to a drained node again."""
    with Client(server, token) as client:
        print_list([client.resume_node(name)], node_table, as_json=as_json)


def node_table(found: Iterable[NodeOverview]) -> Table:
    stages = (SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN)
    rows = (
        (
            node.name,
            node.state,
            node.version,
            *(_occupancy(node.sessions.get(stage, 0), node.places.get(stage)) for stage in stages),
            node.trouble or node.error or "",
        )
        for node in found
    )
    return table(["NODE", "STATE", ">POLICY", *(f">{stage.upper()}" for stage in stages), "ERROR"], rows)


def _occupancy(sessions: int, places: int | None) -> str:
    return str(sessions) if places is None else f"{sessions}/{places}"
