"""`polar tasks`: what was asked, how far it is, and how to stop it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect, one_of
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from polar.models.views import SessionView, TaskView


def tasks(
    task_id: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="Show this task alone.", show_default=False),
    ] = None,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH...]",
            help="After the word check: tasksets and task files to check.",
            show_default=False,
        ),
    ] = None,
    status: Annotated[
        str | None, typer.Option(help="Only tasks that are queued, running, finished or cancelled.")
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel TASK: end its sessions.")] = False,
    harness: Annotated[
        str | None, typer.Option(help="With check: as if every task had this harness.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List tasks, show one, cancel one, or check files of tasks.

    `polar tasks` lists, `polar tasks TASK` shows one with its instruction and sessions, and --cancel
    ends those of its sessions that have not ended. `polar tasks check PATH...` reads tasksets and task
    files without submitting anything, and names every problem by file, line and field.

    Examples:

      polar tasks --status running
      polar tasks fix-typo
      polar tasks fix-typo --cancel
      polar tasks check taskset.yaml
    """
    from polar.cli.output import print_json, print_json_line, print_parts
    from polar.cli.summary import cancellation, task_table
    from polar.models.task import TaskStatus

    if paths:
        if task_id != "check":
            raise InvalidInput(f"one TASK at a time, not {task_id!r} and {paths[0]}")
        _check(paths, harness, as_json)
        return
    wanted = one_of(TaskStatus, status, "--status")
    if task_id is None and cancel:
        raise InvalidInput("--cancel needs the TASK to cancel", hint="polar tasks TASK --cancel")
    if task_id is not None and wanted is not None:
        raise InvalidInput("--status chooses from the list of tasks; it does not go with TASK")
    with connect(server, token) as client:
        if task_id is None:
            views = client.tasks(status=wanted)
            if as_json:
                for view in views:
                    print_json_line(view)
            else:
                print_parts(task_table(views))
            return
        view = client.cancel(task_id) if cancel else client.task(task_id)
        if as_json:
            print_json(view)
            return
        _print_task(view, list(client.sessions(task_id=task_id)))
        if cancel and (note := cancellation(view.status, view.sessions)):
            print_parts(f"\n{note}")


def _check(paths: list[Path], harness: str | None, as_json: bool) -> None:
    from polar.cli.output import print_json, print_parts
    from polar.tasksets.files import read_tasks
    from polar.tasksets.task_document import unknown_names

    loaded = read_tasks(*paths, over={"harness": {"name": harness}} if harness is not None else None)
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
