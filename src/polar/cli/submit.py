"""`polar submit`: tasks from files to the rollout server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polar.cli.options import AsJson, Server, Token, connect
from polar.errors import PolarError

if TYPE_CHECKING:
    from polar.client import Client
    from polar.models.task import TaskSpec
    from polar.models.views import TaskView


def submit(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="YAML, JSON or JSONL files of tasks, or directories of them; - reads standard input.",
            show_default=False,
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until every session has ended, then print a summary.")
    ] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Submit tasks from files.

    Everything is checked before anything is submitted. A task that is already there with the same
    content is left as it is, so submitting a file again is safe.

    With --json: one task a line, as the server stored it; with --wait, as it ended.

    Examples:

      polar submit examples/quickstart/tasks.yaml --wait
      generate-tasks | polar submit -
    """
    from polar.cli.output import print_json_line, print_parts
    from polar.cli.summary import follow, task_table
    from polar.tasksets.files import load_tasks

    tasks = load_tasks(*files)
    with connect(server, token) as client:
        views = _submit_all(client, tasks)
        if wait:
            views = follow(client, tasks)
    if as_json:
        for view in views:
            print_json_line(view)
        return
    print_parts(task_table(views))
    if not wait:
        print_parts(f"\n{_count(tasks)} submitted. Watch with: polar sessions")


def _submit_all(client: Client, tasks: list[TaskSpec]) -> list[TaskView]:
    from polar.cli.output import concerning

    views: list[TaskView] = []
    try:
        for task in tasks:
            with concerning(f"task {task.id!r}"):
                views.append(client.submit(task))
    except PolarError as error:
        if views:
            already = f"{len(views)} of {len(tasks)} tasks were submitted; submitting all again is safe"
            error.hint = f"{error.hint}; {already}" if error.hint else already
        raise
    return views


def _count(tasks: list[TaskSpec]) -> str:
    sessions = sum(task.samples for task in tasks)
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)} with {sessions} session{'s' * (sessions != 1)}"
