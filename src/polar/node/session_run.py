"""One leased session on its way from sandbox to result."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from polar.client.uploader import CaptureUploader, GrowingCapture
from polar.config import plugins
from polar.errors import NotFound, PolarError, retry_forever
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.gateway.playback import Playback
from polar.gateway.session import without_keys
from polar.harnesses.base import Harness, Installation, check_tools
from polar.models.completion import Completion
from polar.models.component import Component
from polar.models.delivery import Delivery
from polar.models.session import (
    AgentEnd,
    FailureReason,
    Lease,
    Origin,
    SessionResult,
    SessionStatus,
    StageEntry,
    StageSeconds,
    Verdict,
)
from polar.node import packing
from polar.node.agent import AgentRun
from polar.node.artifacts import Artifacts, collect
from polar.node.evaluation import budget, evaluate
from polar.node.failures import reason_for, refuse_disturbed, refuse_full_disk
from polar.node.pools import Seat
from polar.node.sandboxes import Prewarmed, Sandboxes
from polar.node.services import NodeServices
from polar.recordings.capture import CaptureError, parse_capture
from polar.recordings.recording import DamagedRecording
from polar.recordings.tree import TokenTree
from polar.runtimes.base import Sandbox
from polar.telemetry import tracing

log = logging.getLogger(__name__)

STAGES = (SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN)


@dataclass(slots=True)
class SessionRun:
    """The state of one session on this node; `status` is what the next heartbeat reports."""

    lease: Lease
    services: NodeServices
    captures: CaptureUploader
    changed: Callable[[], None]
    """Called on every change of status, so that the server hears of it at once."""
    status: SessionStatus = SessionStatus.INIT
    agent: AgentRun = field(default_factory=AgentRun)
    built: packing.Built | None = None
    """Once the agent is gone."""
    verdict: Verdict | None = None
    task: asyncio.Task[None] | None = None
    """What runs it; None once it has ended, and is only to be delivered."""
    is_lost: bool = False
    """Whether it is no longer this node's."""
    is_called_off: bool = False
    """Whether its task, or it, was cancelled."""
    growth: GrowingCapture = field(init=False)
    """Sends what it captures to the server."""
    _artifacts: Artifacts = field(init=False)
    _span: tracing.SessionSpan = field(init=False)
    _entered: float = field(default_factory=time.monotonic)
    _seconds: dict[SessionStatus, float] = field(default_factory=dict)
    _unreported: list[tuple[SessionStatus, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.growth = self.captures.follow(self.lease, self.capture)
        self._artifacts = Artifacts(self.services.settings.artifact_bytes, self._beside("artifacts"))
        self._span = tracing.session(
            self.lease, node=self.services.settings.name, model=self.services.model.name
        )

    @property
    def name(self) -> str:
        """Names this lease's directory and capture; a session given back keeps its attempt's number."""
        return f"{self.lease.session_id}@{self.lease.fencing_token}"

    @property
    def capture(self) -> Path:
        return self._beside("log")

    def _beside(self, suffix: str) -> Path:
        """What this node keeps of the session until it is stored; outside the sandboxes, which are reaped."""
        return self.services.captures_dir / f"{self.name}.{suffix}"

    @property
    def evaluation_dir(self) -> Path:
        return self.services.kept_dir / self.name

    async def run(self, seat: Seat) -> SessionResult:
        """Take the session through its stages; a failure on the way is a result like others."""
        try:
            await self._stages(seat)
        except PolarError as error:
            return self.result(SessionStatus.FAILED, str(error), reason_for(error))
        except Exception as error:
            log.exception("session %s failed in %s", self.lease.session_id, self.status)
            told = f"internal error in {self.status}: {error!r}"
            return self.result(SessionStatus.FAILED, told, reason_for(error))
        return self.result(SessionStatus.COMPLETED)

    async def _stages(self, seat: Seat) -> None:
        sandboxes = Sandboxes(
            self.lease.session_id, self.lease.task, self.services, self.name, self.services.gateway
        )
        evaluator: Evaluator = plugins.create("evaluators", "evaluator", self.lease.task.evaluator)
        async with (
            self._prepared(sandboxes) as (sandbox, harness, installation),
            Prewarmed(sandboxes.sandbox) as fresh,
        ):
            playback = await self._playback()
            self._enter(SessionStatus.READY)
            await seat.move(self.services.pools.run)
            self._enter(SessionStatus.RUNNING)
            self.agent.traceparent = self._span.traceparent
            if evaluator.wants_fresh_sandbox:
                fresh.begin()
            await self.agent.run(
                self.lease, self.services, sandbox, harness, installation, self.growth, playback
            )
            await seat.move(self.services.pools.postrun)
            self._enter(SessionStatus.POSTRUN)
            self.built = built = await self.services.workers.run(
                packing.build, self.capture, self.lease.task.builder, self._branching
            )
            refuse_disturbed(self.agent, built.calls, self.lease.task)
            refuse_full_disk(self.services.directory)
            await collect(self._artifacts, sandbox, self.lease.task)
            self.verdict = await self._evaluate(evaluator, sandbox, fresh, built)

    @asynccontextmanager
    async def _prepared(self, sandboxes: Sandboxes) -> AsyncIterator[tuple[Sandbox, Harness, Installation]]:
        """INIT: the sandbox as the task asks for it, with the harness in it."""
        task = self.lease.task
        async with AsyncExitStack() as stack:
            async with self.services.pools.init, budget(task.budgets.init_seconds, "init_seconds"):
                check_tools(task)
                harness: Harness = plugins.create("harnesses", "harness", task.harness)
                installation = await self.services.installations.get(task.harness.name, harness)
                self.agent.harness_version = installation.version
                sandbox = await stack.enter_async_context(sandboxes.sandbox(installation.tools))
            yield sandbox, harness, installation

    async def _playback(self) -> Playback | None:
        """What answers the agent's first model calls, where the session begins with another's recording."""
        origin, id, version = self.lease.origin, self.lease.session_id, self.agent.harness_version
        earlier = await self._earlier_attempts() if self.lease.continues else None
        begin = partial(Playback, session_id=id, earlier=earlier, harness_version=version)
        if origin is None:
            return begin(TokenTree(), Origin(session_id=id)) if earlier else None
        try:
            recorded = await self.services.origins.get(self.lease, origin.session_id)
        except (NotFound, DamagedRecording) as error:
            raise PolarError(f"the recording of {origin.session_id} cannot be read: {error}") from error
        self._refuse_another(recorded.result)
        is_whole = recorded.result.agent_end is AgentEnd.EXITED
        return begin(recorded.tree, origin, is_whole=is_whole)

    def _refuse_another(self, recorded: SessionResult) -> None:
        """Raise where a recording is of another model or version of the harness than this node has."""
        model, version = self.services.model, self.agent.harness_version
        if (recorded.model, recorded.renderer) != (model.name, model.renderer):
            raise PolarError(
                f"the recording of {recorded.session_id} is of {recorded.model} (renderer: "
                f"{recorded.renderer}); this node serves {model.name} (renderer: {model.renderer})"
            )
        if None not in (recorded.harness_version, version) and recorded.harness_version != version:
            name = self.lease.task.harness.name
            raise PolarError(
                f"the recording of {recorded.session_id} is of {name} {recorded.harness_version}; this node "
                f"has {name} {version}",
                hint="run it on a node with the version of Polar that recorded it",
            )

    async def _earlier_attempts(self) -> TokenTree | None:
        """What earlier attempts at this session captured; None: it begins anew."""
        fetch, id = self.services.client.capture, self.lease.session_id
        data = await retry_forever("fetch a capture", fetch, id, self.lease.key)
        try:
            return await asyncio.to_thread(parse_capture, data)
        except CaptureError as error:
            log.warning("session %s begins anew: %s", id, error)
            return None

    @property
    def _branching(self) -> Component | None:
        """The strategy that says where branches leave this session; None: none does."""
        branching, origin = self.lease.task.branching, self.lease.origin
        depth = origin.depth if origin else 0
        return branching.at if branching and depth < branching.depth else None

    def _completions(self) -> list[Completion]:
        return list(packing.captured(self.capture).completions)

    async def _evaluate(
        self, evaluator: Evaluator, sandbox: Sandbox, fresh: Prewarmed, built: packing.Built
    ) -> Verdict:
        context = EvaluationContext(
            task=self.lease.task,
            sandbox=sandbox,
            stats=built.stats,
            timeout=self.lease.task.budgets.evaluate_seconds,
            agent_end=self.agent.end,
            exit_code=self.agent.exit_code,
            trace_ends=built.trace_ends,
            completions=self._completions,
            sandbox_maker=fresh.sandbox,
            artifacts=self.evaluation_dir,
            cache=self.services.cache_dir,
            judges=self.services.judges,
        )
        try:
            verdict = await evaluate(evaluator, context)
        except Exception:
            refuse_full_disk(self.services.directory)
            raise
        refuse_full_disk(self.services.directory)
        return verdict

    def result(
        self, status: SessionStatus, error: str | None = None, failure: FailureReason | None = None
    ) -> SessionResult:
        """How the session has ended, without what only its recording tells."""
        self._close_stage()
        is_completed, built = status is SessionStatus.COMPLETED, self.built
        return SessionResult(
            session_id=self.lease.session_id,
            task_id=self.lease.task.id,
            sample=self.lease.sample,
            attempt=self.lease.attempt,
            status=status,
            agent_end=self.agent.end,
            exit_code=self.agent.exit_code,
            error=without_keys(error) if error else None,
            failure=failure,
            warnings=built.warnings if built else (),
            verdict=self._shown_verdict() if is_completed else None,
            seconds=StageSeconds(**{stage: self._seconds.get(stage, 0.0) for stage in STAGES}),
            harness_version=self.agent.harness_version,
            model=self.services.model.name,
            logprobs_mode=self.services.model.logprobs_mode,
            renderer=self.services.model.renderer,
            replay=self.agent.replay,
            branch_at=built.branch_at if is_completed and built else (),
        )

    async def pack(self, result: SessionResult) -> Delivery:
        """What is delivered of the session, with its recording and its artifacts as files. What was captured
        is kept however the session ended."""
        logs = self.services.host.logs / self.name
        try:
            if self.lease.continues and not self.capture.exists():
                # Its agent did not start: what earlier attempts captured is all that there is.
                fetch = self.services.client.capture
                data = await retry_forever("fetch a capture", fetch, self.lease.session_id, self.lease.key)
                self.capture.parent.mkdir(parents=True, exist_ok=True)
                await asyncio.to_thread(self.capture.write_bytes, data)
            delivery = await self.services.workers.run(
                packing.pack,
                Delivery(key=self.lease.key, result=result),
                self.capture,
                self.lease.task.builder,
                self._artifacts,
                ((logs, "logs"), (self.evaluation_dir, "evaluation")),
            )
        except Exception as error:
            log.exception("session %s could not be packed", self.lease.session_id)
            told = f"its recording could not be packed: {error}"
            failed = self.result(SessionStatus.FAILED, told, FailureReason.INFRASTRUCTURE)
            delivery = Delivery(key=self.lease.key, result=failed)
        self.services.metrics.ended.labels(delivery.result.status).inc()
        self._span.end(delivery.result)
        return delivery.model_copy(update={"entered": self.unreported()})

    def _shown_verdict(self) -> Verdict | None:
        """The verdict, whose report may quote what the agent left."""
        if self.verdict is None:
            return None
        return self.verdict.model_copy(update={"report": without_keys(self.verdict.report)})

    def clear_away(self) -> None:
        """Remove what is left of the session on this machine, once all of it is stored."""
        logs = self.services.host.logs
        own_logs = (logs / self.name, *logs.glob(f"{self.name}.*"))
        for directory in (self._beside("artifacts"), self.evaluation_dir, *own_logs):
            shutil.rmtree(directory, ignore_errors=True)
        for suffix in ("log", "recording", "zip"):
            self._beside(suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """This node has nothing more to do with the session, whether there is a result or not."""
        self._span.end(None)

    def unreported(self) -> tuple[StageEntry, ...]:
        """Stages entered that the server has not heard of."""
        now = time.monotonic()
        return tuple(StageEntry(status=status, seconds_ago=now - at) for status, at in self._unreported)

    def mark_reported(self, count: int) -> None:
        """Take note that the server has heard of the first `count` of them."""
        del self._unreported[:count]

    def _enter(self, status: SessionStatus) -> None:
        self._close_stage()
        self.status = status
        self._span.enter(status)
        self._unreported.append((status, self._entered))
        self.changed()

    def _close_stage(self) -> None:
        now = time.monotonic()
        spent = now - self._entered
        self._seconds[self.status] = self._seconds.get(self.status, 0.0) + spent
        self.services.metrics.stage_seconds.labels(self.status).observe(spent)
        self._entered = now
