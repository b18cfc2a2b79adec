"""`polar eval`: harnesses and models on tasksets, as numbers with their confidence."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from polar.cli import options
from polar.cli.compare import print_grids
from polar.cli.interruption import until_interrupted
from polar.cli.output import print_json, print_parts, say, session_progress
from polar.client import AsyncClient
from polar.config.settings import Settings
from polar.errors import InvalidInput
from polar.evals.comparison import Comparison, check_comparable, compare
from polar.evals.documents import report_files, write
from polar.evals.grids import comparison_grids, report_grids
from polar.evals.plan import (
    OWN,
    Conditions,
    Plan,
    check_harnesses,
    keep,
    make_plan,
    named_tasksets,
    parse_harness,
    run_in,
)
from polar.evals.report import Attempt, Report, below_gates, load_report, parse_gate
from polar.evals.run import Journal, report_of, run_plan
from polar.files import digest
from polar.telemetry.logs import log_to_file

Out = Annotated[Path, typer.Option(metavar="DIR", help="Where the evaluation lives; it resumes there.")]
Harnesses = Annotated[
    list[str] | None,
    typer.Option(
        "--harness",
        metavar="[LABEL=]NAME[:{OPTIONS}]",
        help="A harness; may be given several times. Default: own, the one that each task names.",
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="A model for an own engine, or of --engine-url; several are evaluated one after another.",
    ),
]
Samples = Annotated[int, typer.Option(min=1, max=1024, help="Attempts at each task.")]
K = Annotated[
    list[int] | None, typer.Option(min=1, help="Also report pass@K. Default: 1, 2, 4, … up to --samples.")
]
Seed = Annotated[int | None, typer.Option(min=0, help="Samples are drawn with seeds that follow from it.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=10, help="Whatever harnesses ask.")]
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

    Starts engine, server and node for itself, unless --server names a running one. Writes report.html,
    report.md and report.json to --out. Stopped at any moment, the same command goes on where it was.

    A session that failed has not passed. pass@k is the unbiased estimate from all samples of a task, and
    every interval is one over tasks. docs/evaluation.md says how each number is made.

    Examples:

      polar eval --taskset examples/quickstart --harness pi --samples 4 --out evals/pi
      polar eval --taskset tasks.yaml --harness pi --harness codex --out evals/both --fail-under pass@1=0.4
    """
    if server and (model or weights or engine_url or engine_kind or engine_mode or concurrency):
        raise InvalidInput("--server has an engine and a node of its own; leave their options out")
    ks = _ks(k, samples)
    gates = [parse_gate(text, ks) for text in fail_under or ()]
    earlier = load_report(baseline) if baseline else None
    choices = [parse_harness(text) for text in harness or [OWN]]
    if not server:
        check_harnesses(choices)
    policy = digest(weights) if weights else None
    conditions = Conditions(samples, seed, temperature, runtime, pass_reward, ks, policy)
    plan = make_plan(named_tasksets(taskset), choices, model or [None], conditions, run=run_in(out))
    if earlier:
        check_comparable(plan, earlier, f"--baseline {baseline}")
    for problem in plan.problems:
        say(f"left out: {problem}")
    keep(plan, out)
    journal = Journal(out)
    engine = {"url": engine_url or None, "kind": engine_kind, "mode": engine_mode}
    settings = {} if server else _settings(plan, out, config, engine, concurrency)
    _run(plan, journal, server, token, settings, weights)
    report = report_of(plan, journal)
    # Before the comparison, which may yet find nothing to pair.
    write(report_files(report), out)
    comparison = compare(earlier, report, (str(baseline), str(out))) if earlier else None
    if comparison:
        write(report_files(report, comparison), out)
    below = below_gates(report, gates)
    _print(report, comparison, below, out, as_json)
    for line in below:
        say(f"below the gate: {line}", typer.colors.RED)
    if below:
        raise typer.Exit(1)


def _ks(given: list[int] | None, samples: int) -> tuple[int, ...]:
    if not given:
        return tuple(2**power for power in range(samples.bit_length()))
    if max(given) > samples:
        raise InvalidInput(f"--k {max(given)}: needs at least as many --samples, not {samples}")
    return tuple(sorted({1, *given}))


def _settings(
    plan: Plan, out: Path, config: Path | None, engine: dict[str, Any], concurrency: int | None
) -> dict[str | None, Settings]:
    """For each model a system of its own, which keeps its data in the evaluation's directory."""
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
    server: str | None,
    token: str | None,
    settings: dict[str | None, Settings],
    weights: Path | None,
) -> None:
    """Show steps and sessions on standard error: a bar in a terminal, else a line for each that ended."""
    from polar.app.own_system import ServerAddress, rollout_server

    done = [attempt.passed(plan.conditions.threshold) for attempt in journal.attempts.values()]
    if done:
        say(f"going on: {len(done)} of {plan.sessions} sessions had ended")
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
            until_interrupted(run_plan(plan, journal, connect, ended))
    except typer.Exit:
        say("not all sessions have ended; the same command goes on from here")
        raise


def _print(report: Report, comparison: Comparison | None, below: list[str], out: Path, as_json: bool) -> None:
    """The tables; or what a pipeline reads: all numbers, and no single attempt."""
    if not as_json:
        print_grids([*report_grids(report), *(comparison_grids(comparison) if comparison else ())])
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
