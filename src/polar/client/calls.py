"""The control plane's API as values: each call says what to send and how to read the answer.

No I/O happens here, so that the sync and the async client share every word of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter, ValidationError

from polar.config.settings import explain
from polar.errors import InvalidInput, PolarError
from polar.models.access import MadeToken, NewToken, TokenPage
from polar.models.callback import CallbackPage, CallbackStatus, CallbackView
from polar.models.dashboard import NodeList, NodeOverview, Overview
from polar.models.policy import Pause, PolicyOrder, PolicyReport, PolicyView, Resume, Update
from polar.models.session import LeaseKey, SessionEvent, SessionStatus
from polar.models.task import TaskSpec, TaskStatus
from polar.models.views import (
    LEASE_SECRET,
    Deliveries,
    DeliveryOutcomes,
    EventPage,
    Health,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    Release,
    ResultPage,
    ResultPost,
    SessionPage,
    SessionView,
    TaskBatchView,
    TaskPage,
    TaskView,
)

T = TypeVar("T")

_EVENTS = TypeAdapter(tuple[SessionEvent, ...])

PAGE = 200
"""How many things a page holds when the client reads them all."""

MAX_BATCH = 500
MAX_BATCH_BYTES = 8 << 20
"""How many tasks one request carries, and how much of them."""

MAX_BATCH_SECONDS = 30.0
"""How much longer than others the server may take to store a batch."""

MAX_FILTER_CHARACTERS = 30_000
"""Beyond this the task ids do not fit a URL: the client reads the whole feed and filters it."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request."""

    method: str
    path: str
    read: Callable[[bytes], T]
    query: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | Path | None = None
    """The body. A file, which may be large, is read and sent piece by piece."""
    waits: float = 0.0
    """How long the server may hold the answer back, beyond the client's time-out."""


def health() -> Call[Health]:
    return _get("/health", Health)


def overview() -> Call[Overview]:
    return _get("/dashboard/overview", Overview)


def metrics(server: str) -> Call[str]:
    """Outside the API, where scrapers look for it."""
    return Call("GET", f"{server}/metrics", bytes.decode)


def submit(task: TaskSpec | Mapping[str, Any]) -> Call[TaskView]:
    return _post("/tasks", _spec(task), _model(TaskView))


def submit_all(tasks: Iterable[TaskSpec | Mapping[str, Any]]) -> Iterator[Call[TaskBatchView]]:
    """Batches that are small enough for a request; all tasks are checked before the first is sent."""
    batch: list[bytes] = []
    size = 0
    for spec in [_spec(task) for task in tasks]:
        text = spec.model_dump_json().encode()
        if batch and (len(batch) == MAX_BATCH or size + len(text) > MAX_BATCH_BYTES):
            yield _task_batch(batch)
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield _task_batch(batch)


def _task_batch(texts: list[bytes]) -> Call[TaskBatchView]:
    return Call(
        "POST",
        "/tasks/batch",
        _model(TaskBatchView),
        headers={"Content-Type": "application/json"},
        content=b'{"tasks":[' + b",".join(texts) + b"]}",
        waits=MAX_BATCH_SECONDS,
    )


def _spec(task: TaskSpec | Mapping[str, Any]) -> TaskSpec:
    try:
        return task if isinstance(task, TaskSpec) else TaskSpec.model_validate(task)
    except ValidationError as error:
        raise InvalidInput(explain(error)) from None


def task(id: str) -> Call[TaskView]:
    return _get(f"/tasks/{_segment(id)}", TaskView)


def tasks(after: str | None, status: TaskStatus | None) -> Call[TaskPage]:
    return _get("/tasks", TaskPage, _page_query(after, status=status))


def cancel_task(id: str) -> Call[TaskView]:
    return _post(f"/tasks/{_segment(id)}/cancel", None, _model(TaskView))


def session(id: str) -> Call[SessionView]:
    return _get(f"/sessions/{_segment(id)}", SessionView)


def sessions(after: str | None, task_id: str | None, status: SessionStatus | None) -> Call[SessionPage]:
    return _get("/sessions", SessionPage, _page_query(after, task_id=task_id, status=status))


def cancel_session(id: str) -> Call[SessionView]:
    return _post(f"/sessions/{_segment(id)}/cancel", None, _model(SessionView))


def recording(session_id: str) -> Call[bytes]:
    return Call("GET", f"/sessions/{_segment(session_id)}/recording", bytes)


def artifacts(session_id: str) -> Call[bytes]:
    return Call("GET", f"/sessions/{_segment(session_id)}/artifacts", bytes)


def session_events(session_id: str) -> Call[tuple[SessionEvent, ...]]:
    return Call("GET", f"/sessions/{_segment(session_id)}/events", _EVENTS.validate_json)


def events(cursor: int) -> Call[EventPage]:
    return _get("/events", EventPage, [("cursor", str(cursor)), ("limit", str(PAGE))])


def results(
    cursor: int, task_ids: Collection[str] | None, wait_seconds: float, max_staleness: int | None = None
) -> Call[ResultPage]:
    """Results after the cursor, of all tasks or some; more tasks than a URL can name are filtered here."""
    query = [("cursor", str(cursor)), ("limit", str(PAGE)), ("wait_seconds", str(wait_seconds))]
    if max_staleness is not None:
        query.append(("max_staleness", str(max_staleness)))
    read = _model(ResultPage)
    if task_ids is None:
        return Call("GET", "/results", read, tuple(query), waits=wait_seconds)
    if sum(len(id) + len("&task_id=") for id in task_ids) <= MAX_FILTER_CHARACTERS:
        query += [("task_id", id) for id in task_ids]
        return Call("GET", "/results", read, tuple(query), waits=wait_seconds)
    wanted = frozenset(task_ids)

    def read_wanted(body: bytes) -> ResultPage:
        page = read(body)
        mine = tuple(result for result in page.results if result.task_id in wanted)
        return page.model_copy(update={"results": mine})

    return Call("GET", "/results", read_wanted, tuple(query), waits=wait_seconds)


def join(node: str, join: Join) -> Call[Joined]:
    return _post(f"/nodes/{_segment(node)}/join", join, _model(Joined))


def lease(node: str, request: LeaseRequest) -> Call[Leases]:
    return _post(f"/nodes/{_segment(node)}/lease", request, _model(Leases), waits=request.wait_seconds)


def heartbeat(node: str, beat: Heartbeat) -> Call[HeartbeatAnswer]:
    return _post(f"/nodes/{_segment(node)}/heartbeat", beat, _model(HeartbeatAnswer))


def nodes() -> Call[NodeList]:
    return _get("/nodes", NodeList)


def drain_node(node: str) -> Call[NodeOverview]:
    return _post(f"/nodes/{_segment(node)}/drain", None, _model(NodeOverview))


def resume_node(node: str) -> Call[NodeOverview]:
    return _post(f"/nodes/{_segment(node)}/resume", None, _model(NodeOverview))


def policy() -> Call[PolicyView]:
    return _get("/policy", PolicyView)


def pause_policy(pause: Pause) -> Call[PolicyView]:
    return _post("/policy/pause", pause, _model(PolicyView), waits=pause.wait_seconds)


def update_policy(update: Update) -> Call[PolicyView]:
    # Where it fails, the way back is waited for as well.
    return _post("/policy/update", update, _model(PolicyView), waits=2 * update.wait_seconds)


def resume_policy(resume: Resume) -> Call[PolicyView]:
    return _post("/policy/resume", resume, _model(PolicyView), waits=resume.wait_seconds)


def follow_policy(node: str, report: PolicyReport) -> Call[PolicyOrder]:
    return _post(f"/nodes/{_segment(node)}/policy", report, _model(PolicyOrder), waits=report.wait_seconds)


def put_recording(session_id: str, key: LeaseKey, data: bytes | Path) -> Call[None]:
    return _put(session_id, "recording", key, "application/octet-stream", data)


def put_artifacts(session_id: str, key: LeaseKey, data: bytes | Path) -> Call[None]:
    return _put(session_id, "artifacts", key, "application/zip", data)


def _put(session_id: str, what: str, key: LeaseKey, kind: str, data: bytes | Path) -> Call[None]:
    return Call(
        "PUT",
        f"/sessions/{_segment(session_id)}/{what}",
        _nothing,
        query=(("fencing_token", str(key.fencing_token)),),
        headers={"Content-Type": kind, LEASE_SECRET: key.secret},
        content=data,
    )


def post_result(session_id: str, post: ResultPost) -> Call[None]:
    return _post(f"/sessions/{_segment(session_id)}/result", post, _nothing)


def deliver(node: str, deliveries: Deliveries, parts: Iterable[bytes]) -> Call[DeliveryOutcomes]:
    """Several sessions at once; `parts` are the bytes that the deliveries speak of, in their order."""
    head = deliveries.model_dump_json().encode()
    return Call(
        "POST",
        f"/nodes/{_segment(node)}/deliveries",
        _model(DeliveryOutcomes),
        headers={"Content-Type": "application/octet-stream"},
        content=b"".join((head, b"\n", *parts)),
    )


def release(session_id: str, given_back: Release) -> Call[None]:
    return _post(f"/sessions/{_segment(session_id)}/release", given_back, _nothing)


def tokens() -> Call[TokenPage]:
    return _get("/tokens", TokenPage)


def create_token(asked: NewToken) -> Call[MadeToken]:
    return _post("/tokens", asked, _model(MadeToken))


def revoke_token(name_or_id: str) -> Call[TokenPage]:
    return _post(f"/tokens/{_segment(name_or_id)}/revoke", None, _model(TokenPage))


def callbacks(before: str | None, status: CallbackStatus | None, task_id: str | None) -> Call[CallbackPage]:
    query = _page_query(None, before=before or None, status=status, task_id=task_id)
    return _get("/callbacks", CallbackPage, query)


def retry_callback(id: str) -> Call[CallbackView]:
    return _post(f"/callbacks/{_segment(id)}/retry", None, _model(CallbackView))


def _get(path: str, answer: type[T], query: Collection[tuple[str, str]] = ()) -> Call[T]:
    return Call("GET", path, _model(answer), query=tuple(query))


def _post(path: str, body: BaseModel | None, read: Callable[[bytes], T], *, waits: float = 0.0) -> Call[T]:
    return Call(
        "POST",
        path,
        read,
        headers={"Content-Type": "application/json"},
        content=body.model_dump_json().encode() if body is not None else None,
        waits=waits,
    )


def _model(kind: type[T]) -> Callable[[bytes], T]:
    assert issubclass(kind, BaseModel)

    def read(body: bytes) -> T:
        try:
            return kind.model_validate_json(body)
        except ValidationError as error:
            raise PolarError(
                f"the server's answer is not understood: {explain(error)}",
                hint="server and client should be the same version",
            ) from None

    return read


def _nothing(_body: bytes) -> None:
    return None


def _segment(id: str) -> str:
    """An id as one segment of a path, whatever a user typed."""
    if not id or id in (".", ".."):
        raise InvalidInput(f"{id!r} is not an id")
    return quote(id, safe="")


def _page_query(after: str | None, **filters: str | None) -> list[tuple[str, str]]:
    given = {"limit": str(PAGE), "after": after, **filters}
    return [(name, value) for name, value in given.items() if value is not None]
