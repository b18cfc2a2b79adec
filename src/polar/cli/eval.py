"""`polar eval` and `polar compare`: evaluate harnesses and models on tasksets, with confidence intervals."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from polar.cli import options
from polar.cli.interruption import until_interrupted
from polar.cli.output import print_json, print_parts, say, session_progress, table
from polar.client import AsyncClient
from polar.config.plugins import check_components
from polar.config.settings import Settings
from polar.errors import InvalidInput
from polar.evals.comparison import Comparison, check_comparable
from polar.evals.comparison import compare as compare_reports
from polar.evals.documents import comparison_files, report_files, write
from polar.evals.grids import Grid, comparison_grids, report_grids
from polar.evals.plan import (
    OWN,
    Conditions,
    Plan,
    bind_directory,
    check_harnesses,
    make_plan,
    name_tasksets,
    parse_harness,
    run_in,
)
from polar.evals.report import Attempt, Report, below_gates, load_report, only_harness, parse_gate
from polar.evals.run import Journal, report_of, run_plan
from polar.files import digest
from polar.models.task import Run, RunKind
from polar.telemetry.logs import log_to_file

Out = Annotated[
    Path, typer.Option(metavar="DIR", help="Directory of the evaluation, from which it can resume.")
]
Harnesses = Annotated[
    list[str] | None,
    typer.Option(
        "--harness",
        metavar="[LABEL=]NAME[:{OPTIONS}]",
        help="A harness; repeat for several. Default: own, the one that each task names.",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A model to start an engine with, or one at --engine-url; repeat for several.",
    ),
]
Samples = Annotated[int, typer.Option(min=1, max=1024, help="Number of attempts per task.")]
K = Annotated[
    list[int] | None, typer.Option(min=1, help="Also report pass@K. Default: 1, 2, 4, … up to --samples.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Seed from which those of all samples derive.")]
Temperature = Annotated[
    float | None, typer.Option(min=0, max=10, help="Sampling temperature, overriding the harnesses'.")
]
Runtime = Annotated[
    str | None, typer.Option(help="Runtime for all tasks. Default: the one that each task names.")
]
FailUnder = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC=MINIMUM",
        help="Exit with 1 if a harness is below this, such as pass@1=0.4; repeat for several.",
    ),
]
Baseline = Annotated[Path | None, typer.Option(metavar="DIR", help="An earlier evaluation to compare with.")]


def eval(
    taskset: options.Tasksets,
    out: Out,
    harness: Harnesses = None,
    model: Models = None,
    weights: options.Weights = None,
    engine_url: options.EngineUrl = None,
    engine_kind: options.EngineKind = None,
    engine_mode: options.EngineMode = None,
    samples: Samples = 1,
    k: K = None,
    seed: Seed = None,
    temperature: Temperature = None,
    pass_reward: options.PassReward = 1.0,
    runtime: Runtime = None,
    concurrency: options.Concurrency = None,
    fail_under: FailUnder = None,
    baseline: Baseline = None,
    as_json: options.AsJson = False,
    server: options.RunningServer = None,
    token: options.Token = None,
    config: options.ConfigFile = None,
) -> None:
    """Evaluate harnesses and models on tasksets.

    Starts its own engine, server and node, unless --server is given. Writes report.html, report.md and
    report.json to --out. If it is interrupted, the same command resumes it.

    A failed session counts as not passed. pass@k is the unbiased estimate from all samples of a task, and
    intervals are over tasks. docs/evaluation.md explains each number.

    Examples:

      polar eval --taskset examples/quickstart --harness pi --samples 4 --out evals/pi
      polar eval --taskset tasks.yaml --harness pi --harness codex --out evals/both --fail-under pass@1=0.4
    """
    if server and (model or weights or engine_url or engine_kind or engine_mode or concurrency):
        raise InvalidInput("--server has its own engine and node: remove the options for them")
    ks = _ks(k, samples)
    gates = [parse_gate(text, ks) for text in fail_under or ()]
    earlier = load_report(baseline) if baseline else None
    choices = [parse_harness(text) for text in harness or [OWN]]
    if not server:
        check_harnesses(choices)
    policy = digest(weights) if weights else None
    conditions = Conditions(samples, seed, temperature, runtime, pass_reward, ks, policy)
    plan = make_plan(name_tasksets(taskset), choices, model or [None], conditions, run=run_in(out))
    if earlier:
        check_comparable(plan, earlier, f"--baseline {baseline}")
    for problem in plan.problems:
        say(f"left out: {problem}")
    if not server:
        # Before the directory is bound to them.
        for name in {cell.model for cell in plan.cells}:
            for task in plan.tasks(name):
                check_components(task.spec)
    bind_directory(plan, out)
    journal = Journal(out)
    engine = {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode}
    settings = {} if server else _settings(plan, out, config, engine, concurrency)
    named = Run.named(out.resolve().name, RunKind.EVALUATION)
    _run(plan, journal, named, server, token, settings, weights)
    report = report_of(plan, journal)
    # Printed before the comparison, which may still fail.
    write(report_files(report), out)
    comparison = compare_reports(earlier, report, (str(baseline), str(out))) if earlier else None
    if comparison:
        write(report_files(report, comparison), out)
    below = below_gates(report, gates)
    _print(report, comparison, below, out, as_json)
    for line in below:
        say(f"--fail-under: {line}", typer.colors.RED)
    if below:
        raise typer.Exit(1)


def _ks(given: list[int] | None, samples: int) -> tuple[int, ...]:
    if not given:
        return tuple(2**power for power in range(samples.bit_length()))
    if max(given) > samples:
        raise InvalidInput(f"--k {max(given)}: requires at least {max(given)} --samples, not {samples}")
    return tuple(sorted({1, *given}))


def _settings(
    plan: Plan, out: Path, config: Path | None, engine: dict[str, Any], concurrency: int | None
) -> dict[str | None, Settings]:
    """Return the settings of a separate system per model, with its data in the evaluation's directory."""
    from polar.app.own_system import own_settings

    models = list(dict.fromkeys(cell.model for cell in plan.cells))
    settings = {
        model: own_settings(out / "models" / str(number), config, {**engine, "model": model}, concurrency)
        for number, model in enumerate(models)
    }
    log_to_file(out / "logs" / "polar.log", settings[models[0]].log_level)
    return settings


def _run(
    plan: Plan,
    journal: Journal,
    named: Run,
    server: str | None,
    token: str | None,
    settings: dict[str | None, Settings],
    weights: Path | None,
) -> None:
    """Run the plan, with a progress bar on standard error, or a line per ended session without a terminal."""
    from polar.app.own_system import ServerAddress, rollout_server

    done = [attempt.passed(plan.conditions.threshold) for attempt in journal.attempts.values()]
    if done:
        say(f"resuming: {len(done)} of {plan.sessions} sessions have ended")
    try:
        with session_progress(plan.sessions) as (terminal, update):
            tell = partial(terminal.print, style="dim", markup=False)

            def ended(attempt: Attempt) -> None:
                done.append(attempt.passed(plan.conditions.threshold))
                passed = f"{sum(done) / len(done):.0%} passed"
                update(len(done), passed)
                if not terminal.is_terminal:
                    why = attempt.reason(plan.conditions.threshold) or "passed"
                    say(f"{len(done)}/{plan.sessions} {attempt.session_id} {why}; {passed}")

            @asynccontextmanager
            async def connect(model: str | None) -> AsyncIterator[AsyncClient]:
                tasks = [task.spec for task in plan.tasks(model)]
                place = settings[model] if server is None else ServerAddress(server, token)
                async with (
                    rollout_server(place, tasks, tell, policy=weights) as address,
                    AsyncClient(address.url, address.token) as client,
                ):
                    await client.health()
                    yield client

            update(len(done), "")
            until_interrupted(run_plan(plan, journal, connect, ended, named))
    except typer.Exit:
        say("stopped before all sessions ended; run the same command to resume")
        raise


def _print(report: Report, comparison: Comparison | None, below: list[str], out: Path, as_json: bool) -> None:
    if not as_json:
        _print_grids([*report_grids(report), *(comparison_grids(comparison) if comparison else ())])
        print_parts(f"report: {out / 'report.html'}")
        return
    print_json(
        {
            "run": report.run,
            "cells": [cell.model_dump(mode="json", exclude={"tasks"}) for cell in report.cells],
            "comparison": comparison and comparison.model_dump(mode="json"),
            "below": below,
            "files": [str(out / name) for name in ("report.json", "report.md", "report.html")],
        }
    )


def compare(
    before: Annotated[Path, typer.Argument(help="The directory of an evaluation.")],
    after: Annotated[Path, typer.Argument(help="The directory of another evaluation.")],
    before_harness: Annotated[str | None, typer.Option(help="Use only this harness of BEFORE.")] = None,
    after_harness: Annotated[str | None, typer.Option(help="Use only this harness of AFTER.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write comparison.html, .md and .json here.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare two evaluations, paired by task and sample.

    Tasks are paired if their id, question and grading are the same. Cells are paired by harness and model; if
    only one of the two differs, that is what is compared. To compare two harnesses of one evaluation, give
    its directory twice with --before-harness and --after-harness.

    Examples:

      polar compare evals/base evals/trained
      polar compare evals/both evals/both --before-harness pi --after-harness codex
    """
    first = only_harness(load_report(before), before_harness)
    second = only_harness(load_report(after), after_harness)
    names = (f"{before} {before_harness or ''}".strip(), f"{after} {after_harness or ''}".strip())
    made = compare_reports(first, second, names)
    if out:
        write(comparison_files(made), out)
    if as_json:
        print_json(made)
    else:
        _print_grids(comparison_grids(made))


def _print_grids(grids: Iterable[Grid]) -> None:
    """Print the tables of an evaluation, each with its title and note."""
    for grid in grids:
        columns = [column.upper() for column in grid.columns]
        numbers = [f">{column}" for column in columns[grid.words :]]
        note = [Text(grid.note, style="dim")] if grid.note else []
        made = table([*columns[: grid.words], *numbers], grid.rows)
        print_parts(Text(grid.title, style="bold"), made, *note, Text())
