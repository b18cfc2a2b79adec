"""`polar results`: what came of ended sessions, as a table or as parquet files."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from polar.cli.options import AsJson, Server, Token, connect

if TYPE_CHECKING:
    from polar.client import Client
    from polar.models.session import SessionResult
    from polar.tasksets.export import ExportedSession

Item = TypeVar("Item")


def results(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write traces.parquet (a row a trace) and sessions.parquet (a row a session) there.",
            show_default=False,
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only results of this task; may be given several times.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Wait for results still to come: to the end of every --task, else until Ctrl-C."
        ),
    ] = False,
    as_json: AsJson = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Print the results of ended sessions, or write parquet.

    The files appear when they are complete, and replace those of an earlier run. pandas reads them
    with read_parquet, datasets with load_dataset("parquet", data_files=...).

    With --json: one result a line; together with --out, one document that says what was written.

    Examples:

      polar results
      polar results --out data --task fix-typo --follow
    """
    with connect(server, token) as client:
        feed = client.results(task or None, follow=follow)
        if follow:
            feed = _until_interrupted(feed)
        if out is not None:
            _write(client, feed, out, as_json)
        else:
            _print(feed, as_json, live=follow)


def _write(client: Client, feed: Iterator[SessionResult], directory: Path, as_json: bool) -> None:
    from polar.cli.output import print_json, print_parts
    from polar.tasksets.export import export

    written = export(_ended(client, feed), directory)
    if as_json:
        print_json(
            {
                "sessions": written.sessions,
                "traces": written.traces,
                "trainable_tokens": written.trainable_tokens,
                "files": [str(written.traces_path), str(written.sessions_path)],
            }
        )
        return
    counts = (
        f"{written.sessions} sessions, {written.traces} traces, {written.trainable_tokens} trainable tokens"
    )
    print_parts(f"{counts} in {written.traces_path} and {written.sessions_path}")


def _ended(client: Client, feed: Iterator[SessionResult]) -> Iterator[ExportedSession]:
    from polar.cli.output import concerning
    from polar.recordings.recording import decode
    from polar.tasksets.export import ExportedSession

    # Results of one task come close together, so a few remembered tasks save nearly every look-up.
    metadata = lru_cache(maxsize=256)(lambda task_id: client.task(task_id).spec.metadata)
    for result in feed:
        recording = None
        if result.has_recording:
            with concerning(f"session {result.session_id}"):
                recording = decode(client.recording(result.session_id))
        yield ExportedSession(result, metadata(result.task_id), recording)


def _print(feed: Iterator[SessionResult], as_json: bool, *, live: bool) -> None:
    from polar.cli.output import cell, print_json_line, print_parts, table

    if as_json:
        for result in feed:
            print_json_line(result)
        return
    columns = [
        "SESSION",
        "TASK",
        "SAMPLE",
        "STATUS",
        "AGENT",
        "REWARD",
        "TRACES",
        "TRAINABLE",
        "SAMPLED",
        "NOTE",
    ]
    numbers = ["SAMPLE", "REWARD", "TRACES", "TRAINABLE", "SAMPLED"]
    if not live:
        print_parts(table(columns, map(_row, feed), numbers=numbers))
        return
    for result in feed:
        # A table cannot be aligned before its last row is known: each result is a line of its own.
        pairs = zip(columns[1:], _row(result)[1:], strict=True)
        shown = " ".join(f"{name.lower()}={cell(value)}" for name, value in pairs if value not in (None, ""))
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
    """The items until SIGINT or SIGTERM, which end the iteration and never the work on an item."""
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
