"""`polar quickstart`: shows an unmodified agent solving small tasks with a small real model."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polar.cli.interruption import until_interrupted
from polar.cli.options import Samples
from polar.config.settings import DEFAULT_MODEL, Settings, load_settings
from polar.models.task import TaskSpec
from polar.telemetry.logs import log_to_file

Tasks = Annotated[
    Path | None,
    typer.Argument(help="Task file or directory.", show_default="examples/quickstart, or the packaged ones"),
]
Model = Annotated[str | None, typer.Option(help="Another model: a directory or a Hugging Face model id.")]


def quickstart(tasks: Tasks = None, model: Model = None, samples: Samples = None) -> None:
    """Roll out the example tasks from start to finish.

    Starts engine, server and node, shows every session as it runs, prints a summary, and stops everything
    it started.

    Example: polar quickstart --samples 2
    """
    from polar.tasksets.files import load_tasks

    data_dir = Path(".polar") / "runs" / time.strftime("quickstart-%Y%m%d-%H%M%S")
    engine = {"model": model, "tool_prompt": True}
    settings = load_settings(overrides={"data_dir": data_dir, "server": {"port": 0}, "engine": engine})
    if (settings.engine.kind, settings.engine.model) == ("auto", DEFAULT_MODEL):
        # Ready in seconds, where vLLM takes a minute or two to start.
        settings = settings.updated(engine={"kind": "embedded"})
    specs = load_tasks(tasks or _example_tasks())
    if samples is not None:
        specs = [task.model_copy(update={"samples": samples}) for task in specs]
    log_to_file(data_dir / "logs" / "polar.log", settings.log_level, settings.log_format)
    until_interrupted(_roll_out(settings, specs))


async def _roll_out(settings: Settings, tasks: Sequence[TaskSpec]) -> None:
    from polar.app import quickstart as guided
    from polar.store.blobs import recording_path

    console = Console()
    started = time.monotonic()
    results = await guided.run(settings, tasks, console, guided.shipped_policy(settings.engine))
    console.print()
    console.print(guided.summary(results, time.monotonic() - started, settings.data_dir))
    recorded = [result for result in results if result.has_recording]
    best = max(recorded, key=lambda result: -1.0 if result.reward is None else result.reward, default=None)
    if best and (recording := recording_path(settings.data_dir, best.session_id)):
        # On its own line and never wrapped, so that it can be copied.
        console.print(f"\nlook closer: {_polar()} show {recording}", soft_wrap=True, highlight=False)


def _example_tasks() -> Path:
    from polar.app.quickstart import EXAMPLES

    here = Path("examples", "quickstart")
    return here if here.exists() else EXAMPLES / "quickstart"


def _polar() -> str:
    script = Path(sys.argv[0])
    return os.path.relpath(script) if script.name == "polar" and script.is_file() else "polar"


def examples(
    into: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write them to.")] = Path(
        "examples"
    ),
) -> None:
    """Copy the packaged examples here.

    Writes the tasks of `polar quickstart` and the files of a small training run, under the names used in the
    documentation. A clone of the project already has them. Files that differ are never overwritten.

    Example: polar examples  then  polar train examples/grpo-pi/tiny.yaml
    """
    from polar.app.quickstart import copy_examples

    for path in copy_examples(into):
        typer.echo(path)
