"""`polar tasks`: what was asked, how far it is, and how to stop it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, ConfigFile, Server, Token, command_group, connect, one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from polar.app.validation import TaskReport, TrialOutcome
    from polar.models.views import SessionView, TaskView


tasks = command_group()
TaskId = Annotated[str, typer.Argument(metavar="TASK", show_default=False)]
Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Tasksets and task files.", show_default=False)
]


@tasks.callback(invoke_without_command=True)
def list_tasks(
    context: typer.Context,
    status: Annotated[
        str | None, typer.Option(help="Only tasks that are queued, running, finished or cancelled.")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List tasks, show or cancel one, or try files of tasks out before they are submitted.

    Examples:

      polar tasks --status running
      polar tasks show fix-typo
      polar tasks cancel fix-typo
      polar tasks check taskset.yaml
      polar tasks validate taskset.yaml
    """
    if context.invoked_subcommand is not None:
        return
    from polar.cli.output import print_json_line, print_parts
    from polar.cli.summary import task_table
    from polar.models.task import TaskStatus

    wanted = one_of(TaskStatus, status, "--status")
    with connect(server, token) as client:
        views = client.tasks(status=wanted)
        if not as_json:
            print_parts(task_table(views))
            return
        for view in views:
            print_json_line(view)


@tasks.command()
def show(task_id: TaskId, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show a task with its instruction and sessions."""
    from polar.cli.output import print_json

    with connect(server, token) as client:
        view = client.task(task_id)
        if as_json:
            print_json(view)
        else:
            _print_task(view, list(client.sessions(task_id=task_id)))


@tasks.command()
def cancel(task_id: TaskId, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """End those of a task's sessions that have not ended."""
    from polar.cli.output import print_json, print_parts
    from polar.cli.summary import cancellation

    with connect(server, token) as client:
        view = client.cancel(task_id)
        if as_json:
            print_json(view)
            return
        _print_task(view, list(client.sessions(task_id=task_id)))
        if note := cancellation(view.status, view.sessions):
            print_parts(f"\n{note}")


@tasks.command()
def check(
    paths: Paths,
    harness: Annotated[
        str | None, typer.Option(help="As if every task had this harness.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read tasksets and task files without submitting, and name every problem by file, line and field."""
    from polar.cli.output import print_json, print_parts
    from polar.tasksets.files import read_tasks
    from polar.tasksets.task_document import unknown_names

    over = {"harness": {"name": harness}} if harness is not None else None
    loaded = read_tasks(*paths, over=over)
    sessions = sum(task.samples for task in loaded.tasks)
    if as_json:
        found = {"tasks": len(loaded.tasks), "sessions": sessions, "problems": loaded.problems}
        print_json(found)
        raise typer.Exit(1 if loaded.problems else 0)
    for name in sorted({name for task in loaded.tasks for name in unknown_names(task)}):
        typer.secho(f"{name} is not known here; the server may know it", fg=typer.colors.YELLOW, err=True)
    loaded.all_or_nothing()
    count = f"{len(loaded.tasks)} task{'s' * (len(loaded.tasks) != 1)}"
    print_parts(f"{count} with {sessions} session{'s' * (sessions != 1)}: all sound")


@tasks.command()
def validate(
    paths: Paths,
    attacks: Annotated[
        bool, typer.Option("--attacks/--no-attacks", help="Whether cheating is tried too.")
    ] = True,
    pass_reward: Annotated[float, typer.Option(help="The minimum reward for a session to pass.")] = 1.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Sandboxes at a time (default: one per core).")
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run each task in its sandbox without a model, to find those that mislead a policy.

    Each is run with nothing done, with its reference solution where it has one, and with the attacks that
    fit how it is graded. It tells which tasks cannot be solved, reward no work, can be cheated, or score
    the same work differently, and exits with 1 if there are any.
    """
    import os
    from dataclasses import asdict

    from polar.app import validation
    from polar.cli.interruption import until_interrupted
    from polar.cli.output import console, print_json, print_parts, visible
    from polar.config.settings import load_settings
    from polar.tasksets.files import read_tasks

    loaded = read_tasks(*paths, over={"harness": validation.STAND_IN})
    found = loaded.all_or_nothing()
    node = load_settings(config).node
    notes = console(stderr=True)
    reports: list[TaskReport] = []

    def told(report: TaskReport) -> None:
        troubles = ", ".join(report.troubles) or "sound"
        notes.print(visible(f"{len(reports) + 1}/{len(found)} {report.task_id}: {troubles}"), markup=False)
        reports.append(report)

    async def work() -> None:
        async with validation.trial_node(node) as place:
            await validation.validate(
                found,
                loaded.solutions,
                place,
                jobs=jobs or os.cpu_count() or 1,
                attacks=attacks,
                pass_reward=pass_reward,
                told=told,
            )

    until_interrupted(work())
    if as_json:
        print_json([asdict(report) | {"troubles": _named(report)} for report in reports])
    else:
        print_parts(*_validation_parts(reports))
    if any(report.troubles for report in reports):
        raise typer.Exit(1)


def _validation_parts(reports: list[TaskReport]) -> list[RenderableType]:
    from polar.cli.output import table
    from polar.evaluators.attacks import ATTACKS

    rows = [
        (
            report.task_id,
            _rewards(report.nothing),
            _rewards(report.solution),
            f"{len(report.successful_attacks)} of {len(report.attacks)}" if report.attacks else None,
            "; ".join(f"{trouble}: {seen}" for trouble, seen in _named(report).items()) or "sound",
        )
        for report in reports
    ]
    without = sum(not report.solution for report in reports)
    wrong = sum(bool(report.troubles) for report in reports)
    lines = [f"\n{len(reports)} task{'s' * (len(reports) != 1)}, {wrong} with problems"]
    if without:
        lines.append(f"{without} without a reference solution: whether they can be solved was not tried")
    rewarded = {one.trial for report in reports for one in report.successful_attacks}
    lines += [f"{attack.name}: {attack.description}" for attack in ATTACKS if attack.name in rewarded]
    return [table(["TASK", "NOTHING", "SOLUTION", "ATTACKS REWARDED", "VERDICT"], rows), *lines]


def _named(report: TaskReport) -> dict[str, str]:
    return {trouble.value: seen for trouble, seen in report.troubles.items()}


def _rewards(outcomes: Sequence[TrialOutcome]) -> str | None:
    return " ".join("failed" if one.reward is None else f"{one.reward:g}" for one in outcomes) or None


def _print_task(task: TaskView, sessions: list[SessionView]) -> None:
    from polar.cli.output import clock, print_parts, table, visible
    from polar.cli.summary import counts, session_table

    spec = task.spec
    parts = (spec.harness, spec.runtime, spec.builder, spec.evaluator)
    print_parts(
        table(
            ["TASK", spec.id],
            [
                ("status", task.status),
                ("submitted", clock(task.created_at)),
                ("sessions", counts(task.sessions)),
                ("mean reward", task.mean_reward),
                ("parts", " · ".join(part.name for part in parts)),
                ("files", ", ".join(spec.files) or None),
            ],
        ),
        f"\n{visible(spec.instruction)}\n",
        session_table(sessions),
    )
