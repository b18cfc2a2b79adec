"""The REST API: each route says what it takes and gives, and hands over to the service."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from polar import __version__
from polar.models.access import MadeToken, NewToken, TokenPage
from polar.models.dashboard import NodeList, NodeOverview
from polar.models.delivery import CaptureLengths, DeliveryAnswer
from polar.models.policy import Pause, PolicyOrder, PolicyReport, PolicyView, Resume, Update
from polar.models.session import LeaseKey, SessionEvent
from polar.models.task import Id, RunKind, TaskSpec, TaskStatus
from polar.models.views import (
    BranchRequest,
    EventPage,
    Health,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    Joined,
    LeaseRequest,
    Leases,
    Release,
    ReplayRequest,
    ResultPage,
    RunPage,
    RunStart,
    RunSteps,
    RunView,
    SessionFilter,
    SessionPage,
    SessionView,
    TaskBatch,
    TaskBatchView,
    TaskPage,
    TaskView,
    WebhookList,
)
from polar.rollout.access import (
    ADMINS,
    ANYONE,
    LARGE,
    NODES,
    READERS,
    STREAMED,
    TRAINERS,
    Authenticator,
    allow,
    caller_of,
    gone,
    guarded,
)
from polar.rollout.policy import PolicyService
from polar.rollout.service import RolloutService
from polar.store.store import Blob, Store
from polar.store.tokens import TokenStore

MAX_WAIT_SECONDS = 60.0

# Of zip archives too: client generators know no other name for bytes.
_BINARY = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

Limit = Annotated[int, Query(ge=1, le=1000, description="How many a page holds, at most.")]
OfRun = Annotated[str | None, Query(description="Only of this run.")]
After = Annotated[str | None, Query(description="The `next` of the page before.")]
Wait = Annotated[
    float, Query(ge=0, le=MAX_WAIT_SECONDS, description="How long to wait for the first result.")
]
Cursor = Annotated[
    int, Query(ge=0, lt=2**63, description="The `cursor` of the page before; 0: the beginning.")
]
Staleness = Annotated[
    int | None, Query(ge=0, description="How many versions old a result's policy may be; else it is stale.")
]


class SessionsAsked(SessionFilter):
    """A page of the sessions that match."""

    limit: Limit = 100
    after: After = None


def open_routes(service: RolloutService) -> APIRouter:
    """What anyone may ask."""
    router = guarded("health")

    @router.get("/health", dependencies=[allow(ANYONE)])
    async def health() -> Health:
        """Whether the server works, and how many sessions it has in each status."""
        return Health(version=__version__, sessions=await service.store.sessions.counts())

    return router


def user_routes(service: RolloutService) -> APIRouter:
    """Submitting tasks, reading what came of them, and updating the policy."""
    router = guarded("rollout")
    _add_task_routes(router, service)
    _add_run_routes(router, service.store)
    _add_session_routes(router, service)
    _add_feed_routes(router, service)
    _add_policy_routes(router, service.policy)
    return router


def _add_task_routes(router: APIRouter, service: RolloutService) -> None:
    @router.post(
        "/tasks",
        status_code=201,
        responses={200: {"model": TaskView, "description": "Known"}},
        dependencies=[allow(TRAINERS, LARGE)],
    )
    async def submit_task(task: TaskSpec, request: Request, response: Response) -> TaskView:
        """Submit a task. The same task again changes nothing; another one under its id is a conflict."""
        caller_of(request).about = task.id
        batch = await service.submit_all([task])
        if batch.known:
            response.status_code = 200
        return batch.tasks[0]

    @router.post("/tasks/batch", status_code=201, dependencies=[allow(TRAINERS, LARGE)])
    async def submit_tasks(batch: TaskBatch, request: Request) -> TaskBatchView:
        """Submit several tasks: all of them or, if one is refused, none. Known ones change nothing."""
        caller_of(request).about = f"{len(batch.tasks)} from {batch.tasks[0].id} to {batch.tasks[-1].id}"
        return await service.submit_all(batch.tasks)

    @router.get("/tasks", dependencies=[allow(READERS)])
    async def list_tasks(
        status: TaskStatus | None = None, run: OfRun = None, limit: Limit = 100, after: After = None
    ) -> TaskPage:
        """Tasks in the order in which they were submitted."""
        return await service.store.tasks.page(status=status, run=run, limit=limit, after=after)

    @router.get("/tasks/{task_id}", dependencies=[allow(READERS)])
    async def get_task(task_id: str) -> TaskView:
        """One task."""
        return await service.store.tasks.get(task_id)

    @router.post("/tasks/{task_id}/cancel", dependencies=[allow(TRAINERS)])
    async def cancel_task(task_id: str) -> TaskView:
        """Cancel every session of a task that has not ended."""
        return await service.cancel_task(task_id)


def _add_run_routes(router: APIRouter, store: Store) -> None:
    @router.get("/runs", dependencies=[allow(READERS)])
    async def list_runs(
        kind: RunKind | None = None,
        text: Annotated[str | None, Query(max_length=128, description="A part of the name.")] = None,
        limit: Limit = 50,
        after: After = None,
    ) -> RunPage:
        """Runs, the newest first."""
        return await store.runs.page(kind=kind, text=text, limit=limit, after=after)

    @router.get("/runs/{name}", dependencies=[allow(READERS)])
    async def get_run(name: str) -> RunView:
        """One run."""
        return await store.runs.get(name)

    @router.post("/runs/{name}", dependencies=[allow(TRAINERS)])
    async def begin_run(name: Id, body: RunStart) -> RunView:
        """Begin a run whose steps are reported, or resume it after one of them. A run that tasks name need
        not be begun."""
        return await store.runs.begin(name, body)

    @router.post("/runs/{name}/steps", dependencies=[allow(TRAINERS)])
    async def report_steps(name: str, body: RunSteps) -> RunView:
        """Report the numbers of steps, and which tasks they learned from. A step that was reported before is
        replaced."""
        return await store.runs.report(name, body.steps)


def _add_session_routes(router: APIRouter, service: RolloutService) -> None:
    store = service.store

    @router.get("/sessions", dependencies=[allow(READERS)])
    async def list_sessions(wanted: Annotated[SessionsAsked, Query()]) -> SessionPage:
        """Sessions in the order in which they were submitted."""
        return await store.sessions.page(wanted, limit=wanted.limit, after=wanted.after)

    @router.get("/sessions/{session_id}", dependencies=[allow(READERS)])
    async def get_session(session_id: str) -> SessionView:
        """One session."""
        return await store.sessions.get(session_id)

    @router.post("/sessions/{session_id}/cancel", dependencies=[allow(TRAINERS)])
    async def cancel_session(session_id: str) -> SessionView:
        """Cancel a session; one that has ended stays as it is."""
        return await service.cancel_session(session_id)

    @router.post("/sessions/{session_id}/branches", status_code=201, dependencies=[allow(TRAINERS)])
    async def branch_session(session_id: str, body: BranchRequest) -> SessionPage:
        """Add sessions to an ended session's task that begin with its recorded answers and sample on.

        They are numbered after the task's last one, and the task has not ended before they have. A task has
        at most 1024 sessions.
        """
        return await service.branch(session_id, body)

    @router.post("/sessions/{session_id}/replay", status_code=201, dependencies=[allow(TRAINERS)])
    async def replay_session(session_id: str, body: ReplayRequest) -> SessionView:
        """Run an ended session again, its model calls answered from its recording.

        It is the one session of a copy of its task, which sends no webhooks.
        """
        return await service.replay(session_id, body)

    @router.get(
        "/sessions/{session_id}/recording",
        response_class=FileResponse,
        responses={200: {"content": _BINARY}},
        dependencies=[allow(READERS)],
    )
    async def get_recording(session_id: str) -> Response:
        """The recording of an ended session."""
        return _bytes(await store.recording(session_id), "application/octet-stream")

    @router.get("/sessions/{session_id}/events", dependencies=[allow(READERS)])
    async def list_session_events(session_id: str) -> tuple[SessionEvent, ...]:
        """Every change of a session's status, in order, over all its attempts."""
        await store.sessions.get(session_id)
        return await store.events.of(session_id)

    @router.get(
        "/sessions/{session_id}/artifacts",
        response_class=FileResponse,
        responses={200: {"content": _BINARY}},
        dependencies=[allow(READERS)],
    )
    async def get_artifacts(session_id: str) -> Response:
        """What was kept of an ended session's files and logs, as one zip archive."""
        return _bytes(await store.artifact_archive(session_id), "application/zip")


def _add_feed_routes(router: APIRouter, service: RolloutService) -> None:
    store = service.store

    @router.get("/events", dependencies=[allow(READERS)])
    async def list_events(cursor: Cursor = 0, limit: Limit = 100) -> EventPage:
        """Changes of all sessions' statuses in the order in which they were stored."""
        return await store.events.after(cursor, limit=limit)

    @router.get("/results", dependencies=[allow(READERS)])
    async def list_results(
        request: Request,
        cursor: Cursor = 0,
        limit: Limit = 100,
        wait_seconds: Wait = 0.0,
        task_id: Annotated[list[str] | None, Query(description="Only of these tasks.")] = None,
        max_staleness: Staleness = None,
    ) -> ResultPage:
        """Results in the order in which they were stored; waits for the first where there is none yet."""
        page = await service.results(
            cursor, limit=limit, task_ids=task_id, wait_seconds=wait_seconds, gone=gone(request)
        )
        return await service.mark_stale(page, max_staleness)

    @router.get("/webhooks", dependencies=[allow(TRAINERS)])
    async def list_webhooks() -> WebhookList:
        """The URLs that tasks want their results sent to, and how far each has got."""
        return WebhookList(webhooks=await store.webhooks.all())


def node_routes(service: RolloutService) -> APIRouter:
    """Which nodes there are; what they ask: leasing sessions and delivering what came of them."""
    router = guarded("node")
    _add_capture_routes(router, service)

    @router.post("/nodes/{node}/policy", dependencies=[allow(NODES, audited=False)])
    async def follow_policy(node: Id, body: PolicyReport, request: Request) -> PolicyOrder:
        """Report what a node has done, and get its next order; waits for one that is new."""
        return await service.policy.follow(node, body, gone(request))

    @router.get("/nodes", dependencies=[allow(READERS)])
    async def list_nodes() -> NodeList:
        """The nodes that report or hold sessions, and how full they are."""
        return NodeList(nodes=await service.store.nodes.all())

    @router.post("/nodes/{node}/drain", dependencies=[allow(ADMINS)])
    async def drain_node(node: Id) -> NodeOverview:
        """Lease a node nothing more; it finishes what it holds. It stays so until it is resumed."""
        return await service.store.nodes.drain(node)

    @router.post("/nodes/{node}/resume", dependencies=[allow(ADMINS)])
    async def resume_node(node: Id) -> NodeOverview:
        """Lease a drained node sessions again."""
        return await service.resume_node(node)

    @router.post("/nodes/{node}/join", dependencies=[allow(NODES)])
    async def join_node(node: Id, body: Join) -> Joined:
        """Introduce a node; one that speaks another protocol is a conflict."""
        return await service.join(node, body)

    @router.post("/nodes/{node}/lease", dependencies=[allow(NODES, audited=False)])
    async def lease_sessions(node: Id, body: LeaseRequest, request: Request) -> Leases:
        """Lease waiting sessions to a node; waits for the first where there is none."""
        return await service.lease(node, body, gone(request))

    @router.post("/nodes/{node}/heartbeat", dependencies=[allow(NODES, audited=False)])
    async def heartbeat(node: Id, body: Heartbeat) -> HeartbeatAnswer:
        """Renew a node's leases."""
        return await service.heartbeat(node, body)

    @router.post(
        "/nodes/{node}/deliveries",
        openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
        dependencies=[allow(NODES, STREAMED, audited=False)],
    )
    async def deliver(node: Id, request: Request) -> DeliveryAnswer:
        """Deliver what came of leased sessions; the same again changes nothing.

        The body holds deliveries one after another: each is three unsigned 64-bit sizes, then a `Delivery` as
        JSON, the recording and the artifacts, which have these sizes; 0: there is none.
        """
        return await service.deliver(node, request.stream(), caller_of(request))

    @router.post(
        "/sessions/{session_id}/release", status_code=204, dependencies=[allow(NODES, audited=False)]
    )
    async def release_session(session_id: str, body: Release) -> None:
        """Give a leased session back to be run again; the attempt is not counted."""
        await service.release(session_id, body)

    return router


def _add_capture_routes(router: APIRouter, service: RolloutService) -> None:
    @router.post(
        "/nodes/{node}/captures",
        openapi_extra={"requestBody": {"required": True, "content": _BINARY}},
        dependencies=[allow(NODES, audited=False)],
    )
    async def ship_captures(node: Id, request: Request) -> CaptureLengths:
        """Keep what the captures of leased sessions have grown by, until they end; the same again changes
        nothing.

        The body has the form of one with deliveries: each is a `CaptureGrowth` as JSON, with the new bytes in
        the place of a recording.
        """
        return await service.keep_captures(request.stream())

    @router.post(
        "/sessions/{session_id}/capture",
        response_class=StreamingResponse,
        responses={200: {"content": _BINARY}},
        dependencies=[allow(NODES, audited=False)],
    )
    async def get_capture(session_id: str, key: LeaseKey) -> Response:
        """What earlier attempts at a leased session captured, for the node that holds the lease."""
        captured = await service.capture(session_id, key)
        return StreamingResponse(captured, media_type="application/octet-stream")

    @router.post(
        "/sessions/{session_id}/origin",
        response_class=FileResponse,
        responses={200: {"content": _BINARY}},
        dependencies=[allow(NODES, audited=False)],
    )
    async def get_origin(session_id: str, key: LeaseKey) -> Response:
        """The recording that a leased session begins with, for the node that holds the lease."""
        return _bytes(await service.origin(session_id, key), "application/octet-stream")


def token_routes(tokens: TokenStore, authenticator: Authenticator) -> APIRouter:
    """Who may ask for what."""
    router = guarded("access")

    @router.get("/tokens", dependencies=[allow(ADMINS)])
    async def list_tokens() -> TokenPage:
        """All tokens that were ever made, without their secrets."""
        return TokenPage(tokens=await tokens.all())

    @router.post("/tokens", status_code=201, dependencies=[allow(ADMINS)])
    async def create_token(body: NewToken, request: Request) -> MadeToken:
        """Make a token; the answer holds its secret, which is shown this once."""
        caller_of(request).about = f"{body.name} ({body.role.value})"
        return await tokens.create(body)

    @router.post("/tokens/{name}/revoke", dependencies=[allow(ADMINS)])
    async def revoke_token(name: str) -> TokenPage:
        """End a token by its id or its name, at once."""
        revoked = await tokens.revoke(name)
        authenticator.clear_cache()
        return TokenPage(tokens=revoked)

    return router


def _add_policy_routes(router: APIRouter, service: PolicyService) -> None:
    @router.get("/policy", dependencies=[allow(READERS)])
    async def get_policy() -> PolicyView:
        """The policy's version, who pauses it, and how far each live node is."""
        return await service.view()

    @router.post("/policy/pause", dependencies=[allow(TRAINERS)])
    async def pause_policy(body: Pause, request: Request) -> PolicyView:
        """Have nothing sampled until the pause is resumed or times out; again: renew it."""
        return await service.pause(body, request.is_disconnected)

    @router.post("/policy/update", dependencies=[allow(TRAINERS)])
    async def update_policy(body: Update, request: Request) -> PolicyView:
        """Replace the weights of every engine and raise the policy's version."""
        return await service.update(body, request.is_disconnected)

    @router.post("/policy/resume", dependencies=[allow(TRAINERS)])
    async def resume_policy(body: Resume, request: Request) -> PolicyView:
        """End a pause; nothing changes where there is none."""
        return await service.resume(body, request.is_disconnected)


def _bytes(blob: Blob, media_type: str) -> Response:
    if blob.path is not None:
        return FileResponse(blob.path, media_type=media_type)
    return StreamingResponse(blob.chunks(), media_type=media_type)
