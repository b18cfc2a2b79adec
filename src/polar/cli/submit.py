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
            help="Files of tasks (YAML, JSON, JSONL), descriptions of tasksets, rows (JSONL, parquet), or"
            " directories of these or of Harbor tasks; - reads standard input.",
            show_default=False,
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Stay until every session has ended, then print a summary.")
    ] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Report tasks that are not sound, and submit the others.")
    ] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Submit tasks from files.

    Everything is checked before anything is submitted; `polar tasks check` only checks. A task that is
    already there with the same content is left as it is, so submitting a file again is safe.

    With --json: one task a line, as the server stored it; with --wait, as it ended.

    Examples:

      polar submit examples/quickstart/tasks.yaml --wait
      generate-tasks | polar submit -
    """
    from polar.cli.output import print_json_line, print_parts, visible
    from polar.cli.summary import follow, task_table
    from polar.tasksets.files import read_tasks
    from polar.tasksets.loaded import listing

    loaded = read_tasks(*files)
    if skip_bad and loaded.problems and loaded.tasks:
        typer.secho(visible(listing(loaded.problems)), fg=typer.colors.YELLOW, err=True)
        tasks = list(loaded.tasks)
    else:
        tasks = list(loaded.all_or_nothing())
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
    views: list[TaskView] = []
    try:
        views.extend(client.submit_all(tasks))
    except PolarError as error:
        if views:
            already = f"{len(views)} of {len(tasks)} tasks were submitted; submitting all again is safe"
            error.hint = f"{error.hint}; {already}" if error.hint else already
        raise
    return views


def _count(tasks: list[TaskSpec]) -> str:
    sessions = sum(task.samples for task in tasks)
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)} with {sessions} session{'s' * (sessions != 1)}"
