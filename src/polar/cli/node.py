"""`polar node`: one machine's worker for a rollout server that runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import EngineKind, EngineMode, LogFormat, Server, Token

if TYPE_CHECKING:
    from polar.app.stack import Worker

EMBEDDED = "embedded"


def node(
    server: Server = None,
    token: Token = None,
    ca: Annotated[
        Path | None,
        typer.Option(help="Who signed the server's certificate, in PEM (default: $POLAR_CA)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="YAML settings, - for standard input (default: ./polar.yaml)."),
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where its state lives (default: .polar).")] = None,
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
    model: Annotated[
        str | None, typer.Option(help="Default model, a directory, or a Hugging Face model id.")
    ] = None,
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
    from polar.app.stack import joined
    from polar.cli.engine import exit_with_its_parent
    from polar.cli.interruption import until_interrupted
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
    at_work: list[Worker] = []

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
