"""`polar proxy`: any program, with every model call captured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import EngineKind, EngineMode, Model

if TYPE_CHECKING:
    from polar.config.settings import Settings
    from polar.models.session import SessionResult
    from polar.models.task import SamplingPin


def proxy(
    command: Annotated[
        list[str] | None, typer.Argument(help="The program and its arguments, after --.", show_default=False)
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            "--engine-url",
            help="A running vLLM, SGLang, `polar engine` or OpenAI-compatible endpoint; without it one is"
            " started.",
        ),
    ] = None,
    engine_kind: EngineKind = None,
    engine_mode: EngineMode = None,
    model: Model = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sample with this temperature, whatever the program asks.")
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(
            help="Refuse model calls, as a provider does, once the program has run this long.", min=0
        ),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 picks a free one.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where the recording goes (default: .polar/proxy/TIME).")
    ] = None,
) -> None:
    """Run a program against the gateway and keep every token.

    Base URLs and a key for every provider's API are set in its environment, and Codex gets a CODEX_HOME with
    your own configuration and our address; nothing else changes. The model answers whatever name the program
    asks for. Without a program the gateway serves until Ctrl-C and says
    what to set.

    Examples:

      polar proxy --engine http://127.0.0.1:8000 -- my-agent --headless
      polar proxy
    """
    import time

    from polar.app import proxy as around
    from polar.config.settings import load_settings
    from polar.models.task import SamplingPin
    from polar.telemetry.logs import log_to_stderr

    if command:
        around.check(command)
    out = out or Path(".polar") / "proxy" / time.strftime("%Y%m%d-%H%M%S")
    settings = load_settings(
        overrides={
            "data_dir": out,
            "gateway": {"port": port},
            "engine": {"url": engine, "kind": engine_kind, "mode": engine_mode, "model": model},
        }
    )
    log_to_stderr("warning")
    raise typer.Exit(_run(command, settings, SamplingPin(temperature=temperature), max_seconds))


def _run(command: list[str] | None, settings: Settings, pin: SamplingPin, max_seconds: float | None) -> int:
    import asyncio

    from polar.app import proxy as around
    from polar.cli.interruption import until_interrupted

    exit_code = 0

    async def work() -> None:
        nonlocal exit_code
        session = None
        try:
            async with around.wrapped(
                settings, pin, lambda step: typer.echo(step, err=True), max_seconds=max_seconds
            ) as session:
                if command:
                    exit_code = await around.run(command, session.environment)
                else:
                    for name, value in session.environment.items():
                        typer.echo(f"export {name}={value}")
                    typer.echo("serving until Ctrl-C", err=True)
                    await asyncio.Event().wait()
        finally:
            if session is not None and session.result is not None:
                _summarize(session.result, session.recording, is_program=bool(command))

    until_interrupted(work())
    return exit_code


def _summarize(result: SessionResult, recording: Path, *, is_program: bool) -> None:
    from polar.app.proxy import NO_CALLS

    stats = result.stats
    typer.echo(
        f"{stats.completions} model calls, {stats.sampled_tokens} tokens,"
        f" {stats.trainable_tokens} trainable, {stats.traces} traces",
        err=True,
    )
    if is_program and not stats.completions:
        typer.echo(NO_CALLS, err=True)
    if result.has_recording:
        typer.echo(f"look closer: polar show {recording}", err=True)
