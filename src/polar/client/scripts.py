"""Conversations with the server that take several calls: pages to their end, results as they come."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
from dataclasses import replace
from typing import Any, TypeVar

from polar.client import calls
from polar.client.calls import Call
from polar.client.failures import waited_too_long
from polar.models.session import SessionStatus
from polar.models.task import TaskStatus
from polar.models.views import ResultPage, SessionPage, TaskPage, TaskView

T = TypeVar("T")

POLL_SECONDS = 20.0
"""How long one request waits for results before the client asks again."""

Paginator = Generator[Call[Any], Any, None]
"""Yields calls, is sent their answers."""


def task_pages(status: TaskStatus | None) -> Paginator:
    after: str | None = None
    while True:
        page: TaskPage = yield calls.tasks(after, status)
        if page.next is None:
            return
        after = page.next


def session_pages(task_id: str | None, status: SessionStatus | None) -> Paginator:
    after: str | None = None
    while True:
        page: SessionPage = yield calls.sessions(after, task_id, status)
        if page.next is None:
            return
        after = page.next


def result_pages(
    task_ids: Collection[str] | None, cursor: int, follow: bool, max_staleness: int | None = None
) -> Paginator:
    """Pages of the feed to its present end; when following, until the tasks have ended, or for ever.

    A task is seen to have ended before the feed is read to its end for the last time, so that none
    of its results is missed.
    """
    if isinstance(task_ids, str):
        task_ids = [task_ids]
    if task_ids is not None and not task_ids:
        return
    unended = set(task_ids or ()) if follow else set()
    yield from _drop_ended(unended, unended)
    while True:
        goes_on = bool(unended) or (follow and task_ids is None)
        page: ResultPage = yield calls.results(
            cursor, task_ids, POLL_SECONDS if goes_on else 0.0, max_staleness
        )
        nothing_came, cursor = page.cursor == cursor, page.cursor
        if nothing_came and not goes_on:
            return
        seen = {result.task_id for result in page.results}
        yield from _drop_ended(unended, unended if nothing_came else unended & seen)


def _drop_ended(unended: set[str], suspects: Collection[str]) -> Paginator:
    for id in sorted(suspects):
        view: TaskView = yield calls.task(id)
        if view.status in (TaskStatus.FINISHED, TaskStatus.CANCELLED):
            unended.discard(id)


def advance(script: Paginator, answer: Any) -> Call[Any] | None:
    """The script's next call, given the answer to the one before; None at its end."""
    try:
        return script.send(answer)
    except StopIteration:
        return None


def bounded(call: Call[T], deadline: float | None) -> Call[T]:
    """The call, waiting no longer than until a moment of the monotonic clock."""
    if deadline is None:
        return call
    left = deadline - time.monotonic()
    if left <= 0:
        raise waited_too_long()
    if call.waits <= left:
        return call
    query = tuple((name, str(left) if name == "wait_seconds" else value) for name, value in call.query)
    return replace(call, query=query, waits=left)
