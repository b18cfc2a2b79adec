"""`polar node` runs a node for a server elsewhere; `polar nodes` shows and drains those of a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import (
    AsJson,
    ConfigFile,
    DataDir,
    EngineKind,
    EngineMode,
    LogFormat,
    Model,
    Server,
    Token,
    command_group,
    connect,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from polar.app.stack import JoinedNode
    from polar.config.settings import Settings
    from polar.models.dashboard import NodeOverview

EMBEDDED = "embedded"


def node(
    server: Server = None,
    token: Token = None,
    ca: Annotated[
        Path | None,
        typer.Option(help="Who signed the server's certificate, in PEM (default: $POLAR_CA)."),
    ] = None,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    name: Annotated[
        str | None, typer.Option(help="What the server calls it (default: this machine's name).")
    ] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL|embedded",
            help="A running engine, repeated for replicas; embedded (default): one is started.",
        ),
    ] = None,
    engine_kind: EngineKind = None,
    engine_mode: EngineMode = None,
    model: Model = None,
    run_slots: Annotated[
        int | None, typer.Option(help="Agents that run at once (default: what the machine carries).")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes to run here, each with its own gateway (default: 1).")
    ] = None,
    drain_seconds: Annotated[
        float | None, typer.Option(help="How long agents may take to end when it is stopped (default: 60).")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Show /metrics at this port, 0 for any (default: nowhere).")
    ] = None,
    log_format: LogFormat = None,
    exit_with_parent: Annotated[bool, typer.Option("--exit-with-parent", hidden=True)] = False,
    pin: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Join a rollout server and run its sessions on this machine.

    The first Ctrl-C or SIGTERM drains it: no new sessions; agents at work end, or are given back to the
    server when their grace is over. The second ends it at once.

    Its token is best one of the role node: polar token create --role node. It is read from $POLAR_TOKEN or a
    file, so that no process list shows it.

    Example: polar node --server http://trainer:8700 --token-file node.token --engine-url http://gpu:8000
    """
    from polar.cli.engine import exit_with_its_parent
    from polar.config.settings import load_settings, machine_name
    from polar.telemetry.logs import log_to_stderr

    if exit_with_parent:
        exit_with_its_parent()
    urls = [url for url in engine_url or () if url != EMBEDDED] or None
    settings = load_settings(
        config,
        {
            "data_dir": data_dir,
            "server": {"token": token},
            "engine": {"url": urls, "kind": engine_kind, "mode": engine_mode, "model": model},
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
        named = settings.node.model_copy(update={"name": machine_name()})
        settings = settings.model_copy(update={"node": named})
    log_to_stderr(settings.log_level, settings.log_format)
    _run(settings, pin)


def _run(settings: Settings, pin: Path | None) -> None:
    from polar.app.stack import joined
    from polar.cli.interruption import until_interrupted

    at_work: list[JoinedNode] = []

    def drain() -> bool:
        for worker in at_work:
            worker.node.drain()
        return bool(at_work)

    async def work() -> None:
        server, token = settings.node.server, settings.server.token
        async with joined(settings, server, token, typer.echo, pin=pin) as worker:
            at_work.append(worker)
            typer.echo(f"ready as {settings.node.name} with {worker.model.name}")
            await worker.node.run()

    until_interrupted(work(), drain=drain)


nodes = command_group()
Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the node.", show_default=False)]


@nodes.callback(invoke_without_command=True)
def show(context: typer.Context, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the nodes and how full they are, drain one, or resume it.

    A drained node is given no new sessions and finishes those that it has. It stays drained, also when
    it is restarted, until it is resumed. Both need an admin's token. `polar node` starts a node.

    Examples:

      polar nodes
      polar nodes drain gpu-7
      polar nodes resume gpu-7
    """
    if context.invoked_subcommand is None:
        with connect(server, token) as client:
            _print(client.nodes(), as_json)


@nodes.command()
def drain(name: Name, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Give a node no new sessions."""
    with connect(server, token) as client:
        _print([client.drain_node(name)], as_json)


@nodes.command()
def resume(name: Name, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Give a drained node sessions again."""
    with connect(server, token) as client:
        _print([client.resume_node(name)], as_json)


def _print(found: Iterable[NodeOverview], as_json: bool) -> None:
    from polar.cli.output import print_json_line, print_parts, table, visible
    from polar.models.session import SessionStatus

    if as_json:
        for node in found:
            print_json_line(node)
        return
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
