"""`polar generate`: a taskset rolled out into a dataset to fine-tune on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.options import AsJson, ConfigFile, EngineKind, EngineMode, Token
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.tasksets.sft import Written

TASKS_AT_ONCE = 16
"""In flight where nothing else is said: more than one machine runs, so that it never waits for the next."""


Taskset = Annotated[
    list[Path],
    typer.Option(
        "--taskset",
        "-t",
        metavar="PATH",
        help="A taskset.yaml, a task file, rows (JSONL, parquet), or a directory of Harbor tasks or of"
        " these; may be given several times.",
    ),
]
Accept = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help="Which sessions are good: reward, components.NAME, completions, sampled_tokens, seconds,"
        " agent_end, exit_code, metadata.NAME; comparisons, and, or, not, in.",
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Sample k of every task is sampled with seed + k.")]
Retries = Annotated[int, typer.Option(min=0, max=20, help="How often a failed session is tried again.")]
EngineUrl = Annotated[
    list[str] | None,
    typer.Option(help="A running engine, repeated for replicas; without it one is started."),
]
Model = Annotated[str | None, typer.Option(help="Default model, a directory, or a Hugging Face model id.")]
Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        help="A running `polar serve`; without it one is started for this run, with its data in DIR.",
        show_default=False,
    ),
]
Run = Annotated[
    str, typer.Option(help="Another name generates anew where a server has done the same before.")
]


def generate(
    taskset: Taskset,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the dataset goes.")],
    harness: Annotated[str | None, typer.Option(help="The harness of every task.")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Sessions per task, instead of what the tasks say.")
    ] = None,
    accept: Accept = "reward >= 1",
    seed: Seed = None,
    retries: Retries = 2,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Agents that run at once.")] = None,
    engine_url: EngineUrl = None,
    engine_kind: EngineKind = None,
    engine_mode: EngineMode = None,
    model: Model = None,
    server: Server = None,
    token: Token = None,
    run: Run = "",
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Roll a taskset out and write a dataset.

    Runs until done. Interrupted in any way, the same command goes on where it stopped, and no session
    that has ended is run again. Ctrl-C writes what there is so far.

    DIR holds parquet files (sft, tokens, rejected, preference) and a dataset card; `load_dataset` reads
    it. Rows that are not sound are reported, and the others run.

    Examples:

      polar generate -t taskset.yaml --harness pi --samples 8 --accept 'reward >= 1' --out data
      polar generate -t tasks.jsonl --out data --engine-url http://127.0.0.1:8000 --concurrency 32
    """
    from polar.app import datagen
    from polar.app.own_system import DATA, only_writer, own_settings, rollout_server
    from polar.cli.interruption import until_interrupted
    from polar.cli.output import console, print_json, print_parts, visible
    from polar.config.settings import load_settings
    from polar.tasksets.expressions import parse_acceptance
    from polar.tasksets.files import listing, read_tasks
    from polar.tasksets.parquet_file import make_directory
    from polar.telemetry.logs import log_to_file

    condition = parse_acceptance(accept)
    engine = {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode, "model": model}
    if server is not None and any(engine.values()):
        raise InvalidInput("--server has an engine of its own; leave the engine's options out")
    loaded = read_tasks(*taskset, over=_over(harness, samples, seed))
    notes = console(stderr=True)
    if loaded.problems:
        notes.print(visible(listing(loaded.problems)), markup=False, style="yellow")
    if not loaded.tasks:
        raise InvalidInput("no task is sound", hint="see the problems above")
    make_directory(out)
    settings = own_settings(out, config, engine, concurrency) if server is None else load_settings(config)
    log_to_file(out / DATA / "logs" / "polar.log", settings.log_level, settings.log_format)
    made_with = {
        "tasksets": ", ".join(path.name or str(path) for path in taskset),
        "harness": harness,
        "samples": samples,
        "seed": seed,
        "accept": accept,
    }
    plan = datagen.plan(loaded.tasks, run)
    generation = datagen.DatasetGeneration(plan, condition, retries, concurrency or TASKS_AT_ONCE)

    async def work() -> None:
        async with rollout_server(server, token, settings, loaded.tasks, _say) as address:
            written = await datagen.generate(generation, address, out, made_with, notes)
        if as_json:
            print_json(_document(written, out))
        else:
            print_parts(*_lines(written, out))

    with only_writer(out, "generate"):
        until_interrupted(work())


def _say(step: str) -> None:
    typer.echo(f"• {step}", err=True)


def _over(harness: str | None, samples: int | None, seed: int | None) -> dict[str, Any]:
    """What is laid over every task."""
    given = {
        "harness": {"name": harness} if harness is not None else None,
        "samples": samples,
        "sampling": {"seed": seed} if seed is not None else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _document(written: Written, out: Path) -> dict[str, Any]:
    return {
        "sessions": {fate.value: count for fate, count in sorted(written.fates.items())},
        "rows": {table.value: count for table, count in written.rows.items()},
        "tasks": written.tasks,
        "tasks_accepted": written.tasks_accepted,
        "trained_tokens": written.tokens,
        "directory": str(out),
    }


def _lines(written: Written, out: Path) -> list[str]:
    fates = ", ".join(f"{count} {fate}" for fate, count in sorted(written.fates.items())) or "none"
    rows = ", ".join(f"{count} in {table.file}" for table, count in written.rows.items())
    lines = [f"sessions: {fates}", f"rows: {rows}", f"dataset: {out}"]
    if written.unjudged:
        lines.insert(1, f"not judged, so not accepted: {written.unjudged}")
    return lines
