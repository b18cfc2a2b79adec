"""`polar eval`: harnesses and models on tasksets, as numbers with their confidence."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.options import AsJson, ConfigFile, EngineKind, EngineMode, Token
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.config.settings import Settings
    from polar.evals.comparison import Comparison
    from polar.evals.plan import Plan
    from polar.evals.report import Attempt, Report
    from polar.evals.run import Journal


Taskset = Annotated[
    list[Path],
    typer.Option(
        "--taskset",
        "-t",
        metavar="PATH",
        help="A taskset.yaml, a task file, rows, or a directory of them; may be given several times.",
    ),
]
Harness = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[LABEL=]NAME[:{OPTIONS}]",
        help="A harness; may be given several times. Default: own, the one that each task names.",
        show_default=False,
    ),
]
Model = Annotated[
    list[str] | None,
    typer.Option(
        help="A model for an own engine, or of --engine-url; several are evaluated one after another."
    ),
]
EngineUrl = Annotated[
    list[str] | None, typer.Option(help="A running engine, repeated for replicas; else one is started.")
]
K = Annotated[
    list[int] | None,
    typer.Option("--k", min=1, help="Also report pass@K. Default: 1, 2, 4, … up to --samples."),
]
Runtime = Annotated[
    str | None, typer.Option(help="The sandbox for all tasks. Default: the one that each names.")
]
FailUnder = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC=MINIMUM",
        help="Exit with 1 if a harness stays below, for example pass@1=0.4; may be given several times.",
    ),
]
Baseline = Annotated[
    Path | None, typer.Option(metavar="DIR", help="An earlier evaluation to compare with, paired.")
]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="A running rollout server to use instead of starting one."),
]


def eval(
    taskset: Taskset,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the evaluation lives; it resumes there.")],
    harness: Harness = None,
    model: Model = None,
    engine_url: EngineUrl = None,
    engine_kind: EngineKind = None,
    engine_mode: EngineMode = None,
    samples: Annotated[int, typer.Option(min=1, max=1024, help="Attempts at each task.")] = 1,
    k: K = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Sample n of a task gets the seed + n.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=10, help="Whatever harnesses ask.")] = None,
    pass_reward: Annotated[float, typer.Option(help="Minimum reward for a session to pass.")] = 1.0,
    runtime: Runtime = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Agents that run at once.")] = None,
    fail_under: FailUnder = None,
    baseline: Baseline = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
    config: ConfigFile = None,
) -> None:
    """Evaluate harnesses and models on tasksets.

    Starts engine, server and node for itself, unless --server names a running one. Writes report.html,
    report.md and report.json to --out. Stopped at any moment, the same command goes on where it was.

    A session that failed has not passed. pass@k is the unbiased estimate from all samples of a task, and
    every interval is one over tasks. docs/evaluation.md says how each number is made.

    Examples:

      polar eval --taskset examples/quickstart --harness pi --samples 4 --out evals/pi
      polar eval --taskset tasks.yaml --harness pi --harness codex --out evals/both --fail-under pass@1=0.4
    """
    from polar.cli.output import visible
    from polar.evals.comparison import check_comparable, compare
    from polar.evals.documents import report_files, write
    from polar.evals.plan import (
        OWN,
        Conditions,
        check_harnesses,
        keep,
        kept_run,
        make_plan,
        named_tasksets,
        new_run,
        parse_harness,
    )
    from polar.evals.report import below_gates, load_report, parse_gate
    from polar.evals.run import Journal, report_of

    ks = _ks(k, samples)
    gates = [parse_gate(text, ks) for text in fail_under or ()]
    if server and (model or engine_url or engine_kind or engine_mode or concurrency):
        raise InvalidInput("--server has an engine and a node of its own; leave their options out")
    earlier = load_report(baseline) if baseline else None
    choices = [parse_harness(text) for text in harness or [OWN]]
    if not server:
        check_harnesses(choices)
    conditions = Conditions(samples, seed, temperature, runtime, pass_reward, ks)
    models: list[str | None] = [*model] if model else [None]
    plan = make_plan(named_tasksets(taskset), choices, models, conditions, run=kept_run(out) or new_run())
    if earlier:
        check_comparable(plan, earlier, f"--baseline {baseline}")
    for problem in plan.problems:
        typer.echo(f"left out: {visible(problem)}", err=True)
    keep(plan, out)
    journal = Journal(out)
    engine = {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode}
    settings = {} if server else _settings(plan, out, config, engine, concurrency)
    _run(plan, journal, server, token, settings)
    report = report_of(plan, journal)
    # Before the comparison, which may yet find nothing to pair.
    write(report_files(report), out)
    comparison = compare(earlier, report, (str(baseline), str(out))) if earlier else None
    if comparison:
        write(report_files(report, comparison), out)
    _tell(report, comparison, below_gates(report, gates), out, as_json)


def _tell(report: Report, comparison: Comparison | None, below: list[str], out: Path, as_json: bool) -> None:
    """Print the report; exit with 1 if a harness is below a gate."""
    from polar.cli.output import print_json

    if as_json:
        print_json(_summary(report, comparison, below, out))
    else:
        _print(report, comparison, out)
    for line in below:
        typer.secho(f"below the gate: {line}", fg=typer.colors.RED, err=True)
    if below:
        raise typer.Exit(1)


def _run(
    plan: Plan,
    journal: Journal,
    server: str | None,
    token: str | None,
    settings: Mapping[str | None, Settings],
) -> None:
    from contextlib import asynccontextmanager

    from polar.app.own_system import rollout_server
    from polar.cli.interruption import until_interrupted
    from polar.client import AsyncClient
    from polar.evals.run import run_plan

    try:
        with _progress(plan, journal) as (say, ended):

            @asynccontextmanager
            async def connect(model: str | None) -> AsyncIterator[AsyncClient]:
                tasks = [task.spec for task in plan.tasks(model)]
                async with (
                    rollout_server(server, token, settings.get(model), tasks, say) as address,
                    AsyncClient(address.url, address.token) as client,
                ):
                    await client.health()
                    yield client

            until_interrupted(run_plan(plan, journal, connect, ended))
    except typer.Exit:
        typer.echo("not all sessions have ended; the same command goes on from here", err=True)
        raise


def _ks(given: list[int] | None, samples: int) -> tuple[int, ...]:
    if given:
        if max(given) > samples:
            raise InvalidInput(f"--k {max(given)}: needs at least as many --samples, not {samples}")
        return tuple(sorted({1, *given}))
    return tuple(2**power for power in range(samples.bit_length()))


def _settings(
    plan: Plan, out: Path, config: Path | None, engine: dict[str, Any], concurrency: int | None
) -> dict[str | None, Settings]:
    """For each model a system of its own, which keeps its data in the evaluation's directory."""
    from polar.app.own_system import own_settings
    from polar.telemetry.logs import log_to_file

    models = list(dict.fromkeys(cell.model for cell in plan.cells))
    settings = {
        model: own_settings(out / "models" / str(number), config, {**engine, "model": model}, concurrency)
        for number, model in enumerate(models)
    }
    log_to_file(out / "logs" / "polar.log", settings[models[0]].log_level)
    return settings


@contextmanager
def _progress(
    plan: Plan, journal: Journal
) -> Iterator[tuple[Callable[[str], None], Callable[[Attempt], None]]]:
    """Shows steps and sessions on standard error: a bar in a terminal, else a line for each that ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from polar.cli.output import console, visible

    terminal = console(stderr=True)
    done = [attempt.passed(plan.conditions.threshold) for attempt in journal.attempts.values()]
    if done:
        typer.echo(f"going on: {len(done)} of {plan.sessions} sessions had ended", err=True)
    columns = (
        TextColumn("sessions"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[passed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as bar:
        shown = bar.add_task("", total=plan.sessions, completed=len(done), passed="")

        def ended(attempt: Attempt) -> None:
            done.append(attempt.passed(plan.conditions.threshold))
            passed = f"{sum(done) / len(done):.0%} passed"
            bar.update(shown, completed=len(done), passed=passed)
            if not terminal.is_terminal:
                why = attempt.reason(plan.conditions.threshold) or "passed"
                typer.echo(
                    f"{len(done)}/{plan.sessions} {attempt.session_id} {visible(why)}; {passed}", err=True
                )

        yield lambda step: bar.console.print(step, style="dim", markup=False), ended


def _print(report: Report, comparison: Comparison | None, out: Path) -> None:
    from rich.text import Text

    from polar.cli.output import print_parts
    from polar.cli.report_tables import grid_parts
    from polar.evals.grids import comparison_grids, report_grids

    grids = [*report_grids(report), *(comparison_grids(comparison) if comparison else ())]
    for grid in grids:
        print_parts(*grid_parts(grid), Text())
    print_parts(f"report: {out / 'report.html'}")


def _summary(report: Report, comparison: Comparison | None, below: list[str], out: Path) -> dict[str, Any]:
    """What a pipeline reads: all numbers, and no single attempt."""
    cells = [cell.model_dump(mode="json", exclude={"tasks"}) for cell in report.cells]
    compared = comparison and comparison.model_dump(mode="json")
    return {
        "run": report.run,
        "cells": cells,
        "comparison": compared,
        "below": below,
        "files": [str(out / name) for name in ("report.json", "report.md", "report.html")],
    }
