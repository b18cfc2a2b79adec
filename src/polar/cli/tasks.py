"""`polar tasks`: lists, shows and cancels tasks, and checks task files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.table import Table

from polar.cli.interruption import until_interrupted
from polar.cli.options import AsJson, ConfigFile, Harness, PassReward, Server, Token, command_group, overlay
from polar.cli.output import clock, counted, print_json, print_list, print_parts, say, table, visible
from polar.cli.sessions import cancellation, session_table
from polar.client import Client
from polar.config.settings import load_settings
from polar.models.session import SessionStatus
from polar.models.task import TaskStatus
from polar.models.views import TaskView

if TYPE_CHECKING:
    from polar.app.validation import TaskReport, TrialOutcome


tasks = command_group()
TaskId = Annotated[str, typer.Argument(metavar="TASK")]
Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Tasksets and task files.")]
Attacks = Annotated[bool, typer.Option("--attacks/--no-attacks", help="Whether to run attacks as well.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Number of sandboxes at a time (default: one per core).")
]


@tasks.callback(invoke_without_command=True)
def list_tasks(
    context: typer.Context,
    status: Annotated[TaskStatus | None, typer.Option(help="Only tasks in this state.")] = None,
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
    if context.invoked_subcommand is None:
        with Client(server, token) as client:
            print_list(client.tasks(status=status), task_table, as_json=as_json)


@tasks.command()
def show(task_id: TaskId, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show a task with its instruction and sessions."""
    with Client(server, token) as client:
        _print(client.task(task_id), client, as_json)


@tasks.command()
def cancel(task_id: TaskId, as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Cancel a task's sessions that have not ended."""
    with Client(server, token) as client:
        view = client.cancel(task_id)
        _print(view, client, as_json)
    if not as_json and (note := cancellation(view.status, view.sessions)):
        print_parts(f"\n{note}")


def _print(task: TaskView, client: Client, as_json: bool) -> None:
    if as_json:
        print_json(task)
        return
    spec = task.spec
    parts = (spec.harness, spec.runtime, spec.builder, spec.evaluator)
    facts = [
        ("status", task.status),
        ("submitted", clock(task.created_at)),
        ("sessions", _counts(task.sessions)),
        ("mean reward", task.mean_reward),
        ("parts", " · ".join(part.name for part in parts)),
        ("files", ", ".join(spec.files) or None),
    ]
    sessions = session_table(client.sessions(task_id=spec.id))
    print_parts(table(["TASK", spec.id], facts), f"\n{visible(spec.instruction)}\n", sessions)


@tasks.command()
def check(paths: Paths, harness: Harness = None, as_json: AsJson = False) -> None:
    """Check tasksets and task files without submitting them; problems name file, line and field."""
    from polar.tasksets.files import read_tasks
    from polar.tasksets.task_document import unknown_names

    loaded = read_tasks(*paths, over=overlay(harness))
    sessions = sum(task.samples for task in loaded.tasks)
    if as_json:
        print_json({"tasks": len(loaded.tasks), "sessions": sessions, "problems": loaded.problems})
        raise typer.Exit(1 if loaded.problems else 0)
    for name in sorted({name for task in loaded.tasks for name in unknown_names(task)}):
        say(f"{name} is not installed here, but may be on the server", typer.colors.YELLOW)
    loaded.all_or_nothing()
    print_parts(f"{counted(len(loaded.tasks), 'task')} with {counted(sessions, 'session')}: all valid")


@tasks.command()
def validate(
    paths: Paths,
    attacks: Attacks = True,
    pass_reward: PassReward = 1.0,
    jobs: Jobs = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Run each task in its sandbox without a model, to find those that would mislead a policy.

    Each task is run with nothing done, with its reference solution if it has one, and with the attacks that
    apply to its grading. Reports tasks that cannot be solved, reward no work, can be cheated or escaped, or
    score the same work differently, and exits with 1 if there are any.
    """
    from polar.app import validation
    from polar.tasksets.files import read_tasks

    loaded = read_tasks(*paths, over={"harness": validation.STAND_IN})
    found = loaded.all_or_nothing()
    node = load_settings(config).node
    reports: list[TaskReport] = []

    def note(report: TaskReport) -> None:
        reports.append(report)
        say(f"{len(reports)}/{len(found)} {report.task_id}: {', '.join(report.troubles) or 'sound'}")

    async def work() -> None:
        async with validation.trial_node(node) as place:
            await validation.validate(
                found,
                loaded.solutions,
                place,
                jobs=jobs or os.cpu_count() or 1,
                attacks=attacks,
                pass_reward=pass_reward,
                note=note,
            )

    until_interrupted(work())
    if as_json:
        print_json([asdict(report) | {"troubles": _trouble_names(report)} for report in reports])
    else:
        print_parts(*_validation_parts(reports, attacks))
    if any(report.troubles for report in reports):
        raise typer.Exit(1)


def _validation_parts(reports: Sequence[TaskReport], attacks: bool) -> list[RenderableType]:
    from polar.evaluators.attacks import ATTACKS

    rows = [
        (
            report.task_id,
            _rewards(report.nothing),
            _rewards(report.solution),
            f"{len(report.successful_attacks)} of {len(report.attacks)}" if report.attacks else None,
            "; ".join(f"{trouble}: {seen}" for trouble, seen in _trouble_names(report).items()) or "sound",
        )
        for report in reports
    ]
    wrong = sum(bool(report.troubles) for report in reports)
    lines = [f"\n{counted(len(reports), 'task')}, {wrong} with problems"]
    if without := sum(not report.solution for report in reports):
        lines.append(f"{without} without a reference solution were not checked for solvability")
    if attacks and (spared := sum(not report.attacks for report in reports)):
        lines.append(f"{counted(spared, 'task')} not attacked: the runtime process isolates nothing")
    told = {one.trial for report in reports for one in (*report.successful_attacks, *report.escapes)}
    lines += [f"{attack.name}: {attack.description}" for attack in ATTACKS if attack.name in told]
    return [table(["TASK", "NOTHING", "SOLUTION", "ATTACKS REWARDED", "VERDICT"], rows), *lines]


def _trouble_names(report: TaskReport) -> dict[str, str]:
    return {trouble.value: seen for trouble, seen in report.troubles.items()}


def _rewards(outcomes: Sequence[TrialOutcome]) -> str | None:
    return " ".join("failed" if one.reward is None else f"{one.reward:g}" for one in outcomes) or None


def task_table(tasks: Iterable[TaskView]) -> Table:
    rows = (
        (
            task.spec.id,
            task.status,
            task.spec.harness.name,
            task.spec.samples,
            _counts(task.sessions),
            task.mean_reward,
        )
        for task in tasks
    )
    return table(["TASK", "STATUS", "HARNESS", ">SAMPLES", "SESSIONS", ">MEAN REWARD"], rows)


def _counts(sessions: Mapping[SessionStatus, int]) -> str:
    """Return `2 running, 1 completed`, in the order of a session's life."""
    return ", ".join(f"{sessions[status]} {status}" for status in SessionStatus if status in sessions)
