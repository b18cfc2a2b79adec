"""`polar serve`: the rollout server and, unless nodes join it from elsewhere, a node with its engine."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from polar.cli import options
from polar.cli.interruption import until_interrupted
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings, load_settings
from polar.errors import InvalidInput
from polar.telemetry.logs import log_to_stderr

WarmStart = Annotated[
    bool,
    typer.Option(
        "--warm-start",
        help="Start with the policy of `polar quickstart`: the default model with an adapter trained on"
        " such tasks. Default: the model as published.",
    ),
]
TlsCert = Annotated[
    Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM); requires --tls-key.")
]
TlsClientCa = Annotated[
    Path | None, typer.Option(help="Accept only clients with a certificate signed by this authority (PEM).")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow listening beyond this machine without TLS.")
]
NoNode = Annotated[
    bool, typer.Option("--no-node", help="Run only the rollout server; nodes join with `polar node`.")
]


def serve(
    config: options.ConfigFile = None,
    data_dir: options.DataDir = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (default: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on (default: 8700).")] = None,
    engine_url: options.EngineUrl = None,
    engine_kind: options.EngineKind = None,
    engine_mode: options.EngineMode = None,
    model: options.Model = None,
    weights: options.Weights = None,
    warm_start: WarmStart = False,
    run_slots: options.RunSlots = None,
    nodes: options.NodeCount = None,
    log_format: options.LogFormat = None,
    tls_cert: TlsCert = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    tls_client_ca: TlsClientCa = None,
    insecure: Insecure = False,
    no_node: NoNode = False,
) -> None:
    """Run the whole system on this machine until Ctrl-C.

    Example: polar serve --warm-start &  then  polar submit examples/quickstart
    """
    if (warm_start or weights) and no_node:
        raise InvalidInput("--weights and --warm-start cannot be combined with --no-node")
    if warm_start and weights:
        raise InvalidInput("--warm-start and --weights cannot be combined")
    if tls_cert is None and (tls_key is not None or tls_client_ca is not None):
        raise InvalidInput("--tls-key and --tls-client-ca require --tls-cert")
    tls = {"cert": tls_cert, "key": tls_key, "client_ca": tls_client_ca} if tls_cert else None
    engine = {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode, "model": model}
    settings = load_settings(
        config,
        {
            "data_dir": data_dir,
            "server": {"host": host, "port": port, "tls": tls, "insecure": insecure or None},
            # The warm start was trained with tools described in the prompt.
            "engine": {**engine, "tool_prompt": warm_start or None},
            "node": {"run_slots": run_slots, "count": nodes},
            "log_format": log_format,
        },
    )
    policy = _warm_start(settings.engine) if warm_start else weights
    log_to_stderr(settings.log_level, settings.log_format)
    until_interrupted(_serve(settings, policy, no_node=no_node))


def _warm_start(engine: EngineSettings) -> Path | None:
    from polar.app.quickstart import shipped_policy

    if (policy := shipped_policy(engine)) is None:
        typer.echo(f"no warm start: it requires {DEFAULT_MODEL} in an engine started here")
    return policy


async def _serve(settings: Settings, policy: Path | None, *, no_node: bool) -> None:
    from polar.app.stack import running, serving

    if no_node:
        async with serving(settings, typer.echo) as server:
            await _serve_forever("nodes", server.url, server.dashboard, settings)
    async with running(settings, typer.echo, policy=policy) as stack:
        await _serve_forever(stack.model.name, stack.url, stack.dashboard, settings)


async def _serve_forever(what: str, url: str, dashboard: str, settings: Settings) -> None:
    typer.echo(f"serving {what} at {url} (token: {settings.data_dir / 'token'})")
    # The token is printed only to a terminal, since output in a file stays there.
    typer.echo(f"dashboard: {dashboard if sys.stdout.isatty() else dashboard.partition('#')[0]}")
    await asyncio.Event().wait()
