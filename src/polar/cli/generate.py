"""`polar generate`: rolls out a taskset and writes a fine-tuning dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli import options
from polar.cli.interruption import until_interrupted
from polar.cli.output import console, print_json, print_parts, say
from polar.config.settings import load_settings
from polar.errors import InvalidInput
from polar.models.task import Run, RunKind
from polar.tasksets.expressions import parse_acceptance
from polar.tasksets.files import listing, read_tasks
from polar.telemetry.logs import log_to_file

if TYPE_CHECKING:
    from polar.tasksets.sft import Written

TASKS_AT_ONCE = 16
"""The default concurrency: more than one machine runs, so that it never waits for the next task."""

Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory of the dataset.")]
Accept = Annotated[
    str,
    typer.Option(
        metavar="CONDITION",
        help="Condition for accepting a session, over reward, components.NAME, completions (model calls),"
        " sampled_tokens, seconds, agent_end, exit_code and metadata.NAME.",
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed from which those of all samples derive.")]
Retries = Annotated[int, typer.Option(min=0, max=20, help="Maximum number of retries for a failed session.")]
RunName = Annotated[
    str, typer.Option(help="Name of the run; another name repeats work that the server has already done.")
]
PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME",
        help="Push the dataset to this repository on the Hugging Face hub, with $HF_TOKEN or the login of"
        " `hf auth login`.",
    ),
]
Private = Annotated[
    bool, typer.Option("--private", help="Make the repository private; fail if it is public.")
]


def generate(
    taskset: options.Tasksets,
    out: Out,
    harness: options.Harness = None,
    samples: options.Samples = None,
    accept: Accept = "reward >= 1",
    seed: Seed = None,
    retries: Retries = 2,
    concurrency: options.Concurrency = None,
    engine_url: options.EngineUrl = None,
    engine_kind: options.EngineKind = None,
    engine_mode: options.EngineMode = None,
    model: options.Model = None,
    weights: options.Weights = None,
    server: options.RunningServer = None,
    token: options.Token = None,
    run: RunName = "",
    push_to_hub: PushToHub = None,
    private: Private = False,
    config: options.ConfigFile = None,
    as_json: options.AsJson = False,
) -> None:
    """Roll a taskset out and write a dataset.

    If interrupted, the same command resumes, without repeating sessions. Ctrl-C first writes what has ended.

    DIR gets parquet files (sft, tokens, rejected, preference) and a dataset card; `load_dataset` reads it.
    Invalid rows are reported and the others are run. With --push-to-hub, these files and nothing else in DIR
    are pushed to the Hugging Face hub as well.

    Examples:

      polar generate -t taskset.yaml --harness pi --samples 8 --accept 'reward >= 1' --out data
      polar generate -t tasks.jsonl --out data --engine-url http://127.0.0.1:8000 --concurrency 32
    """
    from polar.app import datagen, own_system
    from polar.files import make_directory
    from polar.tasksets.sft import PUSH

    condition = parse_acceptance(accept)
    engine = {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode, "model": model}
    if server is not None and (weights or any(engine.values())):
        raise InvalidInput("--server has its own engine: remove the options for it")
    if private and push_to_hub is None:
        raise InvalidInput("--private requires --push-to-hub")
    hub = None if push_to_hub is None else datagen.HubDataset.check(push_to_hub, private=private)
    loaded = read_tasks(*taskset, over=options.overlay(harness, samples), seed=seed)
    if loaded.problems:
        say(listing(loaded.problems), typer.colors.YELLOW)
    if not loaded.tasks:
        raise InvalidInput("no valid tasks", hint="see the problems above")
    make_directory(out)
    is_own = server is None
    settings = own_system.own_settings(out, config, engine, concurrency) if is_own else load_settings(config)
    log_to_file(out / own_system.DATA / "logs" / "polar.log", settings.log_level, settings.log_format)
    facts: list[tuple[str, object]] = [("taskset", path.name or path) for path in taskset]
    facts += [("harness", harness), ("samples", samples), ("seed", seed), ("accept", accept)]
    facts += [("weights", weights and weights.name), (PUSH, push_to_hub)]
    plan = datagen.plan(loaded.tasks, run)
    named = Run.named(run or out.resolve().name, RunKind.GENERATION)
    generation = datagen.DatasetGeneration(plan, condition, retries, concurrency or TASKS_AT_ONCE, named)

    def show_step(step: str) -> None:
        say(f"• {step}")

    async def work() -> None:
        place = settings if server is None else own_system.ServerAddress(server, token)
        async with own_system.rollout_server(place, loaded.tasks, show_step, policy=weights) as address:
            written = await datagen.generate(generation, address, out, facts, console(stderr=True))
        _print(written, out, as_json)

    with own_system.only_writer(out, "generate"):
        if server is None:
            own_system.bind_weights(out, weights)
        until_interrupted(work())
        if hub is not None:
            hub.push(out, show_step)


def _print(written: Written, out: Path, as_json: bool) -> None:
    fates = sorted(written.fates.items())
    if as_json:
        print_json(
            {
                "sessions": {fate.value: count for fate, count in fates},
                "rows": {table.value: count for table, count in written.rows.items()},
                "tasks": written.tasks,
                "tasks_accepted": written.tasks_accepted,
                "trained_tokens": written.trained_tokens,
                "directory": str(out),
            }
        )
        return
    print_parts(f"sessions: {', '.join(f'{count} {fate}' for fate, count in fates) or 'none'}")
    if written.unjudged:
        print_parts(f"not accepted, because --accept could not be evaluated: {written.unjudged}")
    rows = ", ".join(f"{count} in {table.file}" for table, count in written.rows.items())
    print_parts(f"rows: {rows}", f"dataset: {out}")
