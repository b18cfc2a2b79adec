"""`polar proxy`: runs any program and captures every model call."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.interruption import until_interrupted
from polar.cli.options import EngineKind, EngineMode, EngineUrl, Model
from polar.cli.output import say
from polar.config.settings import load_settings
from polar.models.task import SamplingPin
from polar.telemetry.logs import log_to_stderr

if TYPE_CHECKING:
    from polar.app.proxy import ProxySession

Command = Annotated[list[str] | None, typer.Argument(help="The program and its arguments, after --.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature, overriding the program's.")]
MaxSeconds = Annotated[
    float | None,
    typer.Option(min=0, help="Refuse model calls after this many seconds, as if out of quota."),
]
Out = Annotated[
    Path | None, typer.Option(help="Directory of the recording (default: one of its own in .polar/proxy).")
]


def proxy(
    command: Command = None,
    engine_url: EngineUrl = None,
    engine_kind: EngineKind = None,
    engine_mode: EngineMode = None,
    model: Model = None,
    temperature: Temperature = None,
    max_seconds: MaxSeconds = None,
    port: Annotated[int, typer.Option(help="Port of the gateway; 0 picks a free one.")] = 0,
    out: Out = None,
) -> None:
    """Run a program against the gateway and keep every token.

    Its environment gets base URLs and a key for every provider's API, and Codex gets a CODEX_HOME with your
    own configuration and our base URL. Agents that take their model from elsewhere are known by the name of
    their command, and get the variables or the option that they need. Nothing else changes. The model answers
    under any name. Without a program, the gateway runs until Ctrl-C and prints the variables to set.

    Examples:

      polar proxy --engine http://127.0.0.1:8000 -- my-agent --headless
      polar proxy
    """
    from polar.app import proxy as around

    if command:
        around.check(command)
    settings = load_settings(
        overrides={
            "data_dir": out or Path(".polar") / "proxy" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"),
            "gateway": {"port": port},
            "engine": {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode, "model": model},
        }
    )
    log_to_stderr("warning")
    exit_code = 0

    async def work() -> None:
        nonlocal exit_code
        session = None
        pin = SamplingPin(temperature=temperature)
        try:
            async with around.proxy_session(settings, pin, say, max_seconds=max_seconds) as session:
                exit_code = await _serve(session, command)
        finally:
            if session is not None:
                _summarize(session, is_program=bool(command))

    until_interrupted(work())
    raise typer.Exit(exit_code)


async def _serve(session: ProxySession, command: list[str] | None) -> int:
    from polar.app import proxy as around

    if command:
        return await around.run(*session.launch(command))
    for name, value in session.environment.items():
        typer.echo(f"export {name}={value}")
    say("serving until Ctrl-C")
    await asyncio.Event().wait()
    return 0


def _summarize(session: ProxySession, *, is_program: bool) -> None:
    from polar.app.proxy import NO_CALLS, known_agents

    if (result := session.result) is None:
        return
    stats = result.stats
    say(
        f"{stats.completions} model calls, {stats.sampled_tokens} tokens,"
        f" {stats.trainable_tokens} trainable, {stats.traces} traces"
    )
    if is_program and not stats.completions:
        say(NO_CALLS.format(known=", ".join(sorted(known_agents()))))
    if result.has_recording:
        say(f"look closer: polar show {session.recording}")
