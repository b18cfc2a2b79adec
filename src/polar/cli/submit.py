"""`polar submit`: tasks from files to the rollout server."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from polar.cli.options import AsJson, Harness, Samples, Server, Token, overlay
from polar.cli.output import counted, print_list, print_parts, say, session_progress
from polar.cli.tasks import task_table
from polar.client import Client
from polar.errors import InvalidInput, PolarError
from polar.models.session import SessionResult, SessionStatus
from polar.models.task import MAX_ID, Run, RunKind, TaskSpec
from polar.models.views import TaskView
from polar.tasksets.files import listing, read_tasks

INTERRUPTED = 130
LEFT = (
    "what was submitted goes on. `polar sessions` shows it, the same command waits for it again, and"
    " `polar tasks cancel TASK` ends its sessions"
)
REASONS = 10
"""Maximum failure reasons shown; the list of sessions has all."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[FILE...]",
        help="Files of tasks (YAML, JSON, JSONL), descriptions of tasksets, rows (JSONL, parquet), or"
        " directories of these or of Harbor tasks; - reads standard input.",
    ),
]
Wait = Annotated[
    bool,
    typer.Option(
        "--wait", help="Stay until every session has ended, then print a summary; exit with 1 if one failed."
    ),
]
RunName = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="The run that new tasks belong to. Default: the file's name with date and time.",
    ),
]
Again = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Submit the tasks of this run again, as another run; without FILE."),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Report tasks that are not sound, and submit the others.")
]


def submit(
    files: Files = None,
    wait: Wait = False,
    run: RunName = None,
    again: Again = None,
    harness: Harness = None,
    samples: Samples = None,
    skip_bad: SkipBad = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Submit tasks from files, or those of an earlier run again.

    Everything is checked before anything is submitted; `polar tasks check` only checks. A task that is
    already there with the same content is left as it is, so submitting a file again is safe.

    Tasks that are submitted together are a run: `polar runs` lists them, and `polar sessions --run` its
    sessions. --again makes new tasks of those of a run, so that they are rolled out anew.

    With --wait, the reasons of failed sessions are counted on standard error. A reward of 0 is no failure:
    `polar sessions --status failed` lists what is.

    With --json: one task a line, as the server stored it; with --wait, as it ended.

    Examples:

      polar submit examples/quickstart/tasks.yaml --wait
      polar submit examples/swe-mini/harbor --harness mini_swe_agent --samples 4
      polar submit --again RUN --harness pi --run with-pi --wait
      generate-tasks | polar submit -
    """
    if bool(files) == bool(again):
        raise InvalidInput("expected FILE... or --again RUN", hint="polar submit --help shows examples")
    over = overlay(harness, samples)
    tasks = _read(files, over, skip_bad=skip_bad) if files else []
    named = _named(run) if run else _named_after(again or _taskset(files or []))
    with interruptible(LEFT), Client(server, token) as client:
        if again:
            tasks = _tasks_of(client, again, named, over)
        # A task may name its own run.
        tasks = [task if task.run and not run else task.model_copy(update={"run": named}) for task in tasks]
        views, known = _submit_all(client, tasks)
        ids, sessions = [task.id for task in tasks], sum(task.samples for task in tasks)
        results = follow(client, ids, sessions) if wait else []
        if wait:
            views = [client.task(id) for id in ids]
    print_list(views, task_table, as_json=as_json)
    if not as_json:
        print_parts(f"\n{_summary(tasks, known)}" + ("" if wait else ". Watch with: polar sessions"))
    exit_if_failed(results)


def _read(files: Sequence[Path], over: Mapping[str, Any], *, skip_bad: bool) -> list[TaskSpec]:
    loaded = read_tasks(*files, over=over)
    if skip_bad and loaded.problems and loaded.tasks:
        say(listing(loaded.problems), typer.colors.YELLOW)
    else:
        loaded.all_or_nothing()
    return list(loaded.tasks)


def _taskset(files: Sequence[Path]) -> str:
    """The name of the first file, or of its directory if it is called as most are."""
    first = files[0].absolute()
    return first.parent.name if first.stem in ("task", "tasks", "taskset") else first.stem


def _named(run: str) -> Run:
    try:
        return Run(name=run)
    except ValidationError:
        raise InvalidInput(
            f"--run {run!r}: not a name",
            hint="letters, digits, '.', '_' and '-', beginning with one of the first",
        ) from None


def _named_after(what: str) -> Run:
    ending = time.strftime("-%Y%m%d-%H%M%S")
    return Run.named(what[: MAX_ID - len(ending)] + ending, RunKind.SUBMISSION)


def _tasks_of(client: Client, again: str, named: Run, over: Mapping[str, Any]) -> list[TaskSpec]:
    """The tasks of a run as new ones; replays are left out, which are no tasks of their own."""
    from polar.app.rollouts import with_stable_id

    kind = client.run(again).kind
    if kind is not RunKind.SUBMISSION:
        raise InvalidInput(
            f"--again: run {again!r} is of kind {kind}", hint="only submissions are submitted again"
        )
    replays = {one.task_id for one in client.sessions(run=again) if one.origin and one.sample == 0}
    tasks = [view.spec for view in client.tasks(run=again) if view.spec.id not in replays]
    return [
        with_stable_id(TaskSpec.model_validate({**task.model_dump(), **over, "run": named}), named.name)
        for task in tasks
    ]


@contextmanager
def interruptible(left: str) -> Iterator[None]:
    """Say what Ctrl-C leaves behind."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"\nstopped waiting; {left}")
        raise typer.Exit(INTERRUPTED) from None


def follow(
    client: Client, task_ids: Sequence[str], expected: int, only: Collection[str] = ()
) -> list[SessionResult]:
    """Stay until every session of the tasks has ended, or those of `only`, with a progress bar if a person is
    watching. `expected`: how many these are, branches aside."""
    found: list[SessionResult] = []
    with session_progress(expected) as (_, update):
        # With stale results: they are too old to learn from, but have ended.
        for page in client.result_pages(task_ids, follow=True):
            found += [result for result in page.results if not only or result.session_id in only]
            rewards = [result.reward for result in found if result.reward is not None]
            mean = f"mean reward {sum(rewards) / len(rewards):.2f}" if rewards else ""
            update(len(found), mean)
            if only and len(found) == expected:
                break
    return found


def exit_if_failed(results: Sequence[SessionResult]) -> None:
    """End the command with 1 and the reasons if a session failed."""
    if failed := failures(results):
        say(failed, typer.colors.RED)
        raise typer.Exit(1)


def _submit_all(client: Client, tasks: Sequence[TaskSpec]) -> tuple[list[TaskView], frozenset[str]]:
    """Return the tasks as stored, and the ids of those that existed before."""
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


def _summary(tasks: Sequence[TaskSpec], known: frozenset[str]) -> str:
    new = [task for task in tasks if task.id not in known]
    runs = ", ".join(dict.fromkeys(task.named_run.name for task in new))
    old = [task for task in tasks if task.id in known]
    there = f"{_count(old)} already there"
    if not new:
        return f"{there}: nothing new was submitted"
    return f"{_count(new)} submitted" + (f", {there}" if old else "") + f"; run: {runs}"


def _count(tasks: Sequence[TaskSpec]) -> str:
    return f"{counted(len(tasks), 'task')} with {counted(sum(task.samples for task in tasks), 'session')}"


def failures(results: Sequence[SessionResult]) -> str:
    """Count failed sessions by the first line of their error, most frequent first."""
    failed = (result.error or "" for result in results if result.status is SessionStatus.FAILED)
    reasons = Counter(next(iter(error.strip().splitlines()), "no reason given") for error in failed)
    if not reasons:
        return ""
    lines = [f"{count} × {reason}" for reason, count in reasons.most_common(REASONS)]
    if others := len(reasons) - len(lines):
        lines.append(f"and {others} other reasons: polar sessions --status failed")
    return "\n  ".join([f"{reasons.total()} of {len(results)} sessions failed:", *lines])
