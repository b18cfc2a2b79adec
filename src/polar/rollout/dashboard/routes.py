"""The REST API of the dashboard: everything in it is read, and made to the measure of a page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from statistics import fmean, pstdev
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from polar.errors import PolarError
from polar.models.component import view
from polar.models.dashboard import (
    ArtifactList,
    ArtifactText,
    CompletionDetail,
    GroupView,
    Me,
    Outline,
    Overview,
    RunCurves,
    SampleView,
    SessionDetail,
    SessionRow,
    SessionRows,
    TaskRows,
    TokenSlice,
)
from polar.models.task import TaskStatus
from polar.models.views import SessionFilter, SessionView, TaskView
from polar.rollout.access import READERS, allow, caller_of, gone, guarded
from polar.rollout.dashboard.live import Live
from polar.rollout.dashboard.reading import RecordingReader
from polar.rollout.dashboard.watch import Watches
from polar.store.store import Store

Limit = Annotated[int, Query(ge=1, le=200, description="How many a page holds, at most.")]
Before = Annotated[str | None, Query(description="The `older` of the page before.")]
Text = Annotated[str | None, Query(max_length=128, description="A part of the id.")]
Segment = Annotated[int, Query(ge=0, lt=2**31, description="Index of the segment.")]
Start = Annotated[int, Query(ge=0, lt=2**31, description="The first token, within the segment.")]
Count = Annotated[int, Query(ge=1, le=10_000, description="How many tokens, at most.")]


class SessionRowsAsked(SessionFilter):
    """A page of the sessions that match."""

    limit: Limit = 50
    before: Before = None


def dashboard_data_routes(store: Store, live: Live, watches: Watches) -> APIRouter:
    """What the pages ask for."""
    router = guarded("dashboard")
    router.dependencies.append(allow(READERS))
    _add_overview_routes(router, live)
    _add_list_routes(router, store)
    _add_recording_routes(router, store, watches.reader)
    _add_watch_route(router, store, watches)
    return router


def _add_overview_routes(router: APIRouter, live: Live) -> None:

    @router.get("/dashboard/me")
    async def get_me(request: Request) -> Me:
        """Who asks, so that a page offers only what its reader may do."""
        holder = caller_of(request).holder
        assert holder is not None
        return Me(name=holder.name, role=holder.role)

    @router.get("/dashboard/overview")
    async def get_overview() -> Overview:
        """Sessions by status, nodes, the policy, and what ended in the last hour; at most a second old."""
        return await live.overview()

    @router.get("/dashboard/live", response_class=StreamingResponse)
    async def watch(request: Request) -> StreamingResponse:
        """Server-sent events: `changes` holds an `EventPage`, `overview` an `Overview`."""
        return _stream(live.stream(gone(request)))


def _add_list_routes(router: APIRouter, store: Store) -> None:
    @router.get("/dashboard/sessions")
    async def list_session_rows(wanted: Annotated[SessionRowsAsked, Query()]) -> SessionRows:
        """Sessions, the newest first."""
        return await store.listing.sessions(wanted, limit=wanted.limit, before=wanted.before)

    @router.get("/dashboard/tasks")
    async def list_task_rows(
        status: TaskStatus | None = None,
        run: Annotated[str | None, Query(description="Only of this run.")] = None,
        step: Annotated[
            int | None, Query(ge=0, lt=2**31, description="Only those that this step of a run learned from.")
        ] = None,
        harness: Annotated[str | None, Query(description="Only for this harness.")] = None,
        text: Text = None,
        limit: Limit = 50,
        before: Before = None,
    ) -> TaskRows:
        """Tasks, the newest first, with the rewards of their samples."""
        return await store.listing.tasks(
            status=status, run=run, step=step, harness=harness, text=text, limit=limit, before=before
        )

    @router.get("/dashboard/runs/{name}")
    async def get_curves(name: str) -> RunCurves:
        """A run with its numbers over steps, and its rewards over time."""
        return await store.runs.curves(name)

    @router.get("/dashboard/tasks/{task_id}")
    async def get_group(task_id: str) -> GroupView:
        """A task with all its samples and branches, their rewards and advantages."""
        return _group(await store.tasks.get(task_id), await store.listing.group(task_id))


def _add_recording_routes(router: APIRouter, store: Store, reader: RecordingReader) -> None:
    @router.get("/dashboard/sessions/{session_id}")
    async def get_session_detail(session_id: str) -> SessionDetail:
        """A session with its timeline and, once it has ended, the outline of its recording."""
        session = await store.sessions.get(session_id)
        task, siblings, events = await asyncio.gather(
            store.tasks.get(session.task_id),
            store.listing.group(session.task_id),
            store.events.of(session_id),
        )
        outline, unreadable = await _outline(reader, session)
        return SessionDetail(
            session=session,
            step=task.step,
            instruction=task.spec.instruction,
            harness=task.spec.harness.name,
            evaluator=task.spec.evaluator.name,
            group=siblings,
            events=events,
            outline=outline,
            unreadable=unreadable,
        )

    @router.get("/dashboard/sessions/{session_id}/completions/{index}")
    async def get_completion(session_id: str, index: int) -> CompletionDetail:
        """One model call: the request as the harness made it, and the answer."""
        return (await reader.recording(session_id)).completion(index)

    @router.get("/dashboard/sessions/{session_id}/tokens")
    async def get_tokens(
        session_id: str, segment: Segment, start: Start = 0, count: Count = 2_000
    ) -> TokenSlice:
        """Tokens of one segment of the recording."""
        return await reader.tokens(session_id, segment, start, count)

    @router.get("/dashboard/sessions/{session_id}/artifacts")
    async def list_artifacts(session_id: str) -> ArtifactList:
        """What was kept of a session's files and logs."""
        return await reader.artifacts(session_id)

    @router.get("/dashboard/sessions/{session_id}/artifact")
    async def get_artifact(
        session_id: str, name: Annotated[str, Query(description="Path within the archive.")]
    ) -> ArtifactText:
        """The beginning of one kept file."""
        return await reader.artifact(session_id, name)


def _add_watch_route(router: APIRouter, store: Store, watches: Watches) -> None:
    @router.get("/dashboard/sessions/{session_id}/watch", response_class=StreamingResponse)
    async def watch_session(
        session_id: str,
        request: Request,
        last_event_id: Annotated[
            str | None, Header(max_length=64, description="The id of the last event received.")
        ] = None,
    ) -> StreamingResponse:
        """Server-sent events: the model calls of a session, those that were made and those that follow, until
        it has ended. Each event holds a `WatchEvent`; `session` with a result is the last one."""
        await store.sessions.get(session_id)
        return _stream(watches.stream(session_id, last_event_id, gone(request)))


def _stream(frames: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(frames, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _outline(reader: RecordingReader, session: SessionView) -> tuple[Outline | None, str | None]:
    """The outline of a session's recording, or why a page must do without."""
    if session.result is None or not session.result.has_recording:
        return None, None
    try:
        return (await reader.recording(session.id)).outline, None
    except PolarError as error:
        return None, str(error)


def _group(task: TaskView, sessions: Sequence[SessionRow]) -> GroupView:
    """The samples with their advantages, as GRPO has them: in standard deviations from the mean."""
    rewards = [one.reward for one in sessions if one.reward is not None]
    mean = fmean(rewards) if rewards else None
    deviation = pstdev(rewards) if rewards else None
    spec = task.spec
    return view(
        GroupView,
        spec,
        run=spec.named_run.name,
        step=task.step,
        status=task.status,
        created_at=task.created_at,
        harness=spec.harness.name,
        runtime=spec.runtime.name,
        evaluator=spec.evaluator.name,
        builder=spec.builder.name,
        branching=spec.branching.at.name if spec.branching else None,
        files=tuple(spec.files),
        mean=mean,
        standard_deviation=deviation,
        samples=tuple(
            SampleView(
                session=one,
                advantage=(one.reward - mean) / deviation
                if one.reward is not None and mean is not None and deviation
                else None,
            )
            for one in sessions
        ),
    )
