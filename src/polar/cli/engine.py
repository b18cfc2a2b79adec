"""`polar engine`: serves a model over HTTP with a subset of vLLM's API."""

from __future__ import annotations

from typing import Annotated

import typer

from polar.cli.options import LogFormat, Model
from polar.config.settings import load_settings, set_unless_given
from polar.telemetry.logs import log_to_stderr


def engine(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)
    ] = 8000,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    slots: Annotated[int | None, typer.Option(help="Maximum number of requests decoded together.")] = None,
    max_context: Annotated[
        int | None, typer.Option(help="Maximum tokens of prompt and answer together.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Number of CPU threads.")] = None,
    log_format: LogFormat = None,
) -> None:
    """Serve a model in a subset of vLLM's API.

    For Polar's gateway or any client of that API: token ids in and out, with logprobs.

    Example: polar engine --port 8000
    """
    what = {"model": model, "device": device, "dtype": dtype}
    limits = {"slots": slots, "max_context": max_context, "threads": threads}
    settings = load_settings(overrides={"engine": {**what, **limits}, "log_format": log_format})
    log_to_stderr(settings.log_level, settings.log_format)
    # Harnesses share the cores with the engine: compute threads that spin while waiting for each
    # other make a step several times slower whenever anything else runs. Read when torch loads.
    set_unless_given("OMP_WAIT_POLICY", "PASSIVE")
    from polar.engines.embedded.server import serve

    serve(settings.engine, host, port, _say_ready)


def _say_ready(url: str) -> None:
    # Programs that start an engine wait for exactly this line.
    print(f"ready {url}", flush=True)
