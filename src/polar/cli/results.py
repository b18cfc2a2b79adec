"""`polar results` and `polar webhooks`: the results of ended sessions, and where they are sent."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from rich.table import Table

from polar.cli.options import AsJson, Server, Token
from polar.cli.output import cell, clock, print_json, print_list, print_parts, table
from polar.client import Client
from polar.errors import InvalidInput, concerning
from polar.models.session import SessionResult
from polar.models.views import WebhookView

if TYPE_CHECKING:
    from polar.tasksets.export import ExportedSession

Item = TypeVar("Item")

COLUMNS = ["SESSION", "TASK", ">SAMPLE", "STATUS", "AGENT", ">REWARD", ">TRACES", ">TRAINABLE", ">SAMPLED"]

Out = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Write files here: traces.parquet (a row per trace) and sessions.parquet (a row per session).",
    ),
]
Format = Literal["parquet", "atif"]
Form = Annotated[Format, typer.Option("--format", help="Of the files; atif is a trajectory per session.")]
Tasks = Annotated[
    list[str] | None, typer.Option("--task", help="Only results of this task; repeat for several.")
]
Follow = Annotated[
    bool,
    typer.Option(
        "--follow", help="Wait for further results: until every --task has ended, else until Ctrl-C."
    ),
]


def results(
    out: Out = None,
    format: Form = "parquet",
    task: Tasks = None,
    follow: Follow = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Print the results of ended sessions, or write them to files.

    The files appear once complete, and replace those of an earlier run. pandas reads parquet with
    read_parquet, datasets with load_dataset("parquet", data_files=...). ATIF is the format of Harbor.

    With --json, prints one result per line; together with --out, one document that describes the files.

    Examples:

      polar results
      polar results --out data --task fix-typo --follow
      polar results --out trajectories --format atif
    """
    if out is None and format == "atif":
        raise InvalidInput("--format atif writes files: name a directory with --out DIR")
    with Client(server, token) as client:
        # Includes results that `server.max_staleness` marks as stale.
        pages = client.result_pages(task or None, follow=follow)
        feed: Iterator[SessionResult] = (result for page in pages for result in page.results)
        if follow:
            feed = _until_interrupted(feed)
        if out is not None:
            _write(_exported_sessions(client, feed), out, format, as_json)
        elif as_json or not follow:
            print_list(feed, lambda found: table([*COLUMNS, "NOTE"], map(_row, found)), as_json=as_json)
        else:
            _print_live(feed)


def _write(sessions: Iterator[ExportedSession], directory: Path, form: Format, as_json: bool) -> None:
    from polar.tasksets.atif import write_trajectories
    from polar.tasksets.export import export

    if form == "atif":
        counts, files = asdict(write_trajectories(sessions, directory)), [str(directory)]
    else:
        written = export(sessions, directory)
        counts = {
            "sessions": written.sessions,
            "traces": written.traces,
            "trainable_tokens": written.trainable_tokens,
        }
        files = [str(written.traces_path), str(written.sessions_path)]
    if as_json:
        print_json({**counts, "files": files})
        return
    told = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    print_parts(f"{told} in {' and '.join(files)}")


def _exported_sessions(client: Client, feed: Iterator[SessionResult]) -> Iterator[ExportedSession]:
    from polar.recordings.recording import decode
    from polar.tasksets.export import ExportedSession

    # Results of one task arrive close together, so caching a few tasks saves nearly every look-up.
    spec = lru_cache(maxsize=256)(lambda task_id: client.task(task_id).spec)
    for result in feed:
        recording = None
        if result.has_recording:
            with concerning(f"session {result.session_id}"):
                recording = decode(client.recording(result.session_id))
        task = spec(result.task_id)
        yield ExportedSession(result, task.metadata, recording, task.harness.name)


def _print_live(feed: Iterator[SessionResult]) -> None:
    """Print one line per result, since a table cannot be aligned before its last row is known."""
    names = [column.strip(">").lower() for column in (*COLUMNS[1:], "NOTE")]
    for result in feed:
        pairs = zip(names, _row(result)[1:], strict=True)
        shown = " ".join(f"{name}={cell(value)}" for name, value in pairs if value not in (None, ""))
        print_parts(f"{result.session_id} {shown}")


def _row(result: SessionResult) -> tuple[object, ...]:
    stats = result.stats
    return (
        result.session_id,
        result.task_id,
        result.sample,
        result.status,
        result.agent_end,
        result.reward,
        stats.traces,
        stats.trainable_tokens,
        stats.sampled_tokens,
        result.error or "",
    )


def _until_interrupted(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items until SIGINT or SIGTERM, which end the iteration but never the work on an item."""
    interrupted = waiting = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        if waiting:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not interrupted:
            waiting = True
            try:
                item = next(items)
            except (StopIteration, KeyboardInterrupt):
                return
            finally:
                waiting = False
            yield item
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def webhooks(as_json: AsJson = False, server: Server = None, token: Token = None) -> None:
    """Show the URLs that tasks want their results sent to, and how far each has got.

    LAG is the number of results that a receiver has yet to accept. The server retries until they are
    accepted.

    Example: polar webhooks --json
    """
    with Client(server, token) as client:
        print_list(client.webhooks(), _webhook_table, as_json=as_json)


def _webhook_table(views: Iterable[WebhookView]) -> Table:
    rows = (
        (
            view.url,
            view.lag,
            f"{view.lag_seconds:.0f} s",
            view.failures,
            clock(view.delivered_at),
            clock(view.retry_at),
            view.error,
        )
        for view in views
    )
    return table(["URL", ">LAG", ">FOR", ">FAILURES", "DELIVERED", "AGAIN", "LAST ERROR"], rows)
