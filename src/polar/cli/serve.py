"""`polar serve`: the rollout server and, unless nodes join it from elsewhere, one node with its engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import ConfigFile, DataDir, EngineKind, EngineMode, LogFormat, Model
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.config.settings import EngineSettings, Settings


def serve(
    config: ConfigFile = None,
    data_dir: DataDir = None,
    host: Annotated[
        str | None, typer.Option(help="Address of the control plane (default: 127.0.0.1).")
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port of the control plane (default: 8700).")] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(
            help="A running vLLM, SGLang, `polar engine` or OpenAI-compatible endpoint, repeated for"
            " replicas; without it one is started."
        ),
    ] = None,
    engine_kind: EngineKind = None,
    engine_mode: EngineMode = None,
    model: Model = None,
    warm_start: Annotated[
        bool,
        typer.Option(
            "--warm-start",
            help="Begin with the policy of `polar quickstart`: the default model with an adapter that has"
            " seen such tasks. Without it the model samples as it was published.",
        ),
    ] = False,
    run_slots: Annotated[int | None, typer.Option(help="Agents that run at once (default: 8).")] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes to run here, each with its own gateway (default: 1).")
    ] = None,
    log_format: LogFormat = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Speak HTTPS with this certificate (PEM), and --tls-key.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Let in only clients with a certificate that these signed (PEM).")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without TLS.")
    ] = False,
    no_node: Annotated[
        bool, typer.Option("--no-node", help="Only the rollout server: nodes join with `polar node`.")
    ] = False,
) -> None:
    """Run the whole system on this machine until Ctrl-C.

    Example: polar serve --warm-start &  then  polar submit examples/quickstart
    """
    from polar.config.settings import load_settings
    from polar.telemetry.logs import log_to_stderr

    if warm_start and no_node:
        raise InvalidInput("--warm-start goes with a node of this process, not with --no-node")
    if tls_cert is None and (tls_key is not None or tls_client_ca is not None):
        raise InvalidInput("--tls-key and --tls-client-ca go with --tls-cert")
    settings = load_settings(
        config,
        {
            "data_dir": data_dir,
            "server": {
                "host": host,
                "port": port,
                "tls": {"cert": tls_cert, "key": tls_key, "client_ca": tls_client_ca} if tls_cert else None,
                "insecure": insecure or None,
            },
            "engine": {
                "url": engine_url or None,
                "kind": engine_kind,
                "mode": engine_mode,
                "model": model,
                # The warm start was trained with it.
                "tool_prompt": warm_start or None,
            },
            "node": {"run_slots": run_slots, "count": nodes},
            "log_format": log_format,
        },
    )
    policy = _warm_start(settings.engine) if warm_start else None
    log_to_stderr(settings.log_level, settings.log_format)
    _run(settings, policy, no_node=no_node)


def _run(settings: Settings, policy: Path | None, *, no_node: bool) -> None:
    import asyncio

    from polar.app.stack import running, serving
    from polar.cli.interruption import until_interrupted

    async def work() -> None:
        if no_node:
            async with serving(settings, typer.echo) as server:
                typer.echo(f"serving nodes at {server.url} (token: {settings.data_dir / 'token'})")
                _say_dashboard(server.dashboard)
                await asyncio.Event().wait()
        async with running(settings, typer.echo, policy=policy) as stack:
            typer.echo(f"serving {stack.model.name} at {stack.url} (token: {settings.data_dir / 'token'})")
            _say_dashboard(stack.dashboard)
            await asyncio.Event().wait()

    until_interrupted(work())


def _warm_start(engine: EngineSettings) -> Path | None:
    from polar.app.quickstart import shipped_policy
    from polar.config.settings import DEFAULT_MODEL

    if (policy := shipped_policy(engine)) is None:
        typer.echo(f"no warm start: it is for {DEFAULT_MODEL} in an engine that is started here")
    return policy


def _say_dashboard(address: str) -> None:
    """Name the dashboard's address; its token only to a person, for what is written to a file stays there."""
    import sys

    typer.echo(f"dashboard: {address if sys.stdout.isatty() else address.partition('#')[0]}")
