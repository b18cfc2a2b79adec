"""`polar submit`: tasks from files to the rollout server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar.cli.options import AsJson, Server, Token, connect
from polar.errors import PolarError

if TYPE_CHECKING:
    from polar.client import Client
    from polar.models.task import TaskSpec
    from polar.models.views import TaskView

INTERRUPTED = 130


Files = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...",
        help="Files of tasks (YAML, JSON, JSONL), descriptions of tasksets, rows (JSONL, parquet), or"
        " directories of these or of Harbor tasks; - reads standard input.",
        show_default=False,
    ),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait",
        help="Stay until every session has ended, then print a summary; exit with 1 if one failed.",
    ),
]
Harness = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:{OPTIONS}]",
        help="The harness of every task, instead of the one that it names.",
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        min=1, max=1024, help="Attempts at every task, instead of what it says.", show_default=False
    ),
]


def submit(
    files: Files,
    wait: Wait = False,
    harness: Harness = None,
    samples: Samples = None,
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

    With --wait, the reasons of failed sessions are counted on standard error. A reward of 0 is no failure:
    `polar sessions --status failed` lists what is.

    With --json: one task a line, as the server stored it; with --wait, as it ended.

    Examples:

      polar submit examples/quickstart/tasks.yaml --wait
      polar submit examples/swe-mini/harbor --harness mini_swe_agent --samples 4
      generate-tasks | polar submit -
    """
    from polar.cli.output import print_json_line, print_parts, visible
    from polar.cli.summary import failures, follow, task_table
    from polar.tasksets.files import listing, read_tasks

    loaded = read_tasks(*files, over=_over(harness, samples))
    if skip_bad and loaded.problems and loaded.tasks:
        typer.secho(visible(listing(loaded.problems)), fg=typer.colors.YELLOW, err=True)
        tasks = list(loaded.tasks)
    else:
        tasks = list(loaded.all_or_nothing())
    with _interruptible(), connect(server, token) as client:
        views, known = _submit_all(client, tasks)
        results = follow(client, tasks) if wait else []
        if wait:
            views = [client.task(task.id) for task in tasks]
    if as_json:
        for view in views:
            print_json_line(view)
    else:
        print_parts(task_table(views))
        if not wait:
            print_parts(f"\n{_told(tasks, known)}. Watch with: polar sessions")
        elif known:
            print_parts(f"\n{_told(tasks, known)}")
    if failed := failures(results):
        typer.secho(visible(failed), fg=typer.colors.RED, err=True)
        raise typer.Exit(1)


def _over(harness: str | None, samples: int | None) -> dict[str, Any]:
    """The fields that the command line lays over every task."""
    from polar.evals.plan import parse_harness

    over: dict[str, Any] = {}
    if harness is not None and (component := parse_harness(harness).component) is not None:
        over["harness"] = component.model_dump(mode="json")
    return over if samples is None else {**over, "samples": samples}


@contextmanager
def _interruptible() -> Iterator[None]:
    """Say what Ctrl-C leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            "\nstopped waiting; what was submitted goes on. `polar sessions` shows it, the same command waits"
            " for it again, and `polar tasks cancel TASK` ends its sessions",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def _submit_all(client: Client, tasks: list[TaskSpec]) -> tuple[list[TaskView], frozenset[str]]:
    """The tasks as they are stored, and the ids of those that were before."""
    views: list[TaskView] = []
    known: set[str] = set()
    try:
        for batch in client.submit_batches(tasks):
            views += batch.tasks
            known |= set(batch.known)
    except PolarError as error:
        if views:
            already = f"{len(views)} of {len(tasks)} tasks were submitted; submitting all again is safe"
            error.hint = f"{error.hint}; {already}" if error.hint else already
        raise
    return views, frozenset(known)


def _told(tasks: list[TaskSpec], known: frozenset[str]) -> str:
    new = [task for task in tasks if task.id not in known]
    old = [task for task in tasks if task.id in known]
    there = f"{_count(old)} already there"
    if not new:
        return f"{there}: nothing new was submitted"
    return f"{_count(new)} submitted" + (f", {there}" if old else "")


def _count(tasks: list[TaskSpec]) -> str:
    sessions = sum(task.samples for task in tasks)
    return f"{len(tasks)} task{'s' * (len(tasks) != 1)} with {sessions} session{'s' * (sessions != 1)}"
