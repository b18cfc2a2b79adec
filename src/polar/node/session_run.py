"""One leased session on its way from sandbox to result."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polar import plugins
from polar.errors import PolarError
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.gateway.capture import parse_capture
from polar.gateway.session import without_keys
from polar.harnesses.base import Harness, Installation
from polar.models.completion import Completion
from polar.models.session import (
    FailureReason,
    Lease,
    SessionResult,
    SessionStatus,
    StageEntry,
    StageSeconds,
    Verdict,
)
from polar.models.trace import Trajectory
from polar.node.agent import AgentRun
from polar.node.artifacts import Artifacts, collect
from polar.node.failures import BudgetExceeded, ModelCalls, reason_for, refuse_disturbed
from polar.node.pools import Seat
from polar.node.prewarming import Prewarmed
from polar.node.sandboxes import Sandboxes
from polar.node.workshop import Workshop
from polar.runtimes.base import Sandbox
from polar.telemetry import tracing
from polar.trajectory import recording
from polar.trajectory.base import Builder

log = logging.getLogger(__name__)

STAGES = (SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished session: its result, and what else is stored of it where there is something."""

    result: SessionResult
    recording: bytes | None
    artifacts: bytes | None


@dataclass(slots=True)
class SessionRun:
    """The state of one session on this node; `status` is what the next heartbeat reports."""

    lease: Lease
    shop: Workshop
    changed: Callable[[], None]
    """Called on every change of status, so that the server hears of it at once."""
    status: SessionStatus = SessionStatus.INIT
    agent: AgentRun = field(default_factory=AgentRun)
    trajectory: Trajectory | None = None
    verdict: Verdict | None = None
    _artifacts: Artifacts = field(init=False)
    _span: tracing.SessionSpan = field(init=False)
    _entered: float = field(default_factory=time.monotonic)
    _seconds: dict[SessionStatus, float] = field(default_factory=dict)
    _untold: list[tuple[SessionStatus, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._artifacts = Artifacts(self.shop.settings.artifact_bytes)
        self._span = tracing.session(self.lease, node=self.shop.settings.name, model=self.shop.model.name)

    @property
    def name(self) -> str:
        """Of this lease's directory and capture; a session that was given back keeps its attempt's number."""
        return f"{self.lease.session_id}@{self.lease.fencing_token}"

    @property
    def capture(self) -> Path:
        return self.shop.captures_dir / f"{self.name}.log"

    @property
    def kept(self) -> Path:
        return self.shop.kept_dir / self.name

    async def run(self, seat: Seat) -> Outcome:
        """Take the session through its stages; a failure on the way is part of the outcome."""
        try:
            await self._stages(seat)
        except PolarError as error:
            return self._failed(error, str(error))
        except Exception as error:
            log.exception("session %s failed in %s", self.lease.session_id, self.status)
            return self._failed(error, f"internal error in {self.status}: {error!r}")
        return self._outcome(SessionStatus.COMPLETED)

    def _failed(self, error: Exception, told: str) -> Outcome:
        self.verdict = None
        return self._outcome(SessionStatus.FAILED, told, reason_for(error))

    async def _stages(self, seat: Seat) -> None:
        with self.shop.gateway.placed(self.lease.session_id) as gateway:
            await self._stages_with(
                Sandboxes(self.lease.session_id, self.lease.task, self.shop, self.name, gateway), seat
            )

    async def _stages_with(self, sandboxes: Sandboxes, seat: Seat) -> None:
        evaluator: Evaluator = plugins.create("evaluators", "evaluator", self.lease.task.evaluator)
        async with (
            self._prepared(sandboxes) as (sandbox, harness, installation),
            Prewarmed(sandboxes.sandbox) as fresh,
        ):
            self._enter(SessionStatus.READY)
            await seat.move(self.shop.pools.run)
            self._enter(SessionStatus.RUNNING)
            self.agent.traceparent = self._span.traceparent
            if evaluator.wants_fresh_sandbox:
                fresh.begin()
            await self.agent.run(self.lease, self.shop, sandbox, harness, installation, self.capture)
            await seat.move(self.shop.pools.postrun)
            self._enter(SessionStatus.POSTRUN)
            self.trajectory = self._build()
            refuse_disturbed(self.agent, ModelCalls.of(self._completions()), self.lease.task)
            await collect(self._artifacts, sandbox, self.lease.task)
            self.verdict = await self._evaluate(evaluator, sandbox, fresh)

    @asynccontextmanager
    async def _prepared(self, sandboxes: Sandboxes) -> AsyncIterator[tuple[Sandbox, Harness, Installation]]:
        """INIT: the sandbox as the task asks for it, with the harness in it."""
        task = self.lease.task
        async with AsyncExitStack() as stack:
            async with self.shop.pools.init, _budget(task.budgets.init_seconds, "init_seconds"):
                harness: Harness = plugins.create("harnesses", "harness", task.harness)
                installation = await self.shop.installations.get(task.harness.name, harness)
                self.agent.harness_version = installation.version
                sandbox = await stack.enter_async_context(sandboxes.sandbox(installation.mounts))
            yield sandbox, harness, installation

    def _build(self) -> Trajectory:
        builder: Builder = plugins.create("builders", "builder", self.lease.task.builder)
        return builder.build_capture(self.capture.read_bytes() if self.capture.exists() else b"")

    def _completions(self) -> list[Completion]:
        data = self.capture.read_bytes() if self.capture.exists() else b""
        return list(parse_capture(data).completions)

    async def _evaluate(self, evaluator: Evaluator, sandbox: Sandbox, fresh: Prewarmed) -> Verdict:
        assert self.trajectory is not None
        seconds = self.lease.task.budgets.evaluate_seconds
        async with _budget(seconds, "evaluate_seconds"):
            return await evaluator.evaluate(
                EvaluationContext(
                    task=self.lease.task,
                    sandbox=sandbox,
                    stats=self.trajectory.stats,
                    timeout=seconds,
                    agent_end=self.agent.end,
                    exit_code=self.agent.exit_code,
                    trajectory=self.trajectory,
                    completions=self._completions,
                    sandbox_maker=fresh.sandbox,
                    artifacts=self.kept,
                    cache=self.shop.cache_dir,
                    judges=self.shop.judges,
                )
            )

    def cancelled(self) -> Outcome:
        """The outcome of a session that its user called off: what was captured is kept."""
        return self._outcome(SessionStatus.CANCELLED)

    def _outcome(
        self, status: SessionStatus, error: str | None = None, failure: FailureReason | None = None
    ) -> Outcome:
        self._close_stage()
        self.shop.metrics.ended(status)
        try:
            trajectory = self.trajectory or self._build()
        except (PolarError, ValueError) as problem:
            log.exception("session %s: its capture cannot be read", self.lease.session_id)
            trajectory = Trajectory((), ())
            error = "; ".join(filter(None, [error, f"its capture cannot be read: {problem}"]))
        if self.verdict is not None:
            trajectory = trajectory.with_reward(self.verdict.reward, self.verdict.trace_rewards)
        archive = self._archive()
        versions = [
            int(bound)
            for segment in trajectory.segments
            if segment.policy_versions is not None and len(segment.policy_versions)
            for bound in (segment.policy_versions.min(), segment.policy_versions.max())
        ]
        result = SessionResult(
            session_id=self.lease.session_id,
            task_id=self.lease.task.id,
            sample=self.lease.sample,
            attempt=self.lease.attempt,
            status=status,
            agent_end=self.agent.end,
            exit_code=self.agent.exit_code,
            error=without_keys(error) if error else error,
            failure=failure,
            warnings=tuple(self._artifacts.problems),
            verdict=self._shown_verdict(),
            stats=trajectory.stats,
            seconds=StageSeconds(**{stage: self._seconds.get(stage, 0.0) for stage in STAGES}),
            policy_version_min=min(versions, default=None),
            policy_version_max=max(versions, default=None),
            harness_version=self.agent.harness_version,
            model=self.shop.model.name,
            logprobs_mode=self.shop.model.logprobs_mode,
            has_recording=trajectory.stats.completions > 0,
            has_artifacts=archive is not None,
        )
        self._span.end(result)
        packed = None
        if result.has_recording:
            packed = recording.encode(self.capture.read_bytes(), trajectory, result)
        return Outcome(result, packed, archive)

    def _shown_verdict(self) -> Verdict | None:
        """The verdict, whose report may quote what the agent left."""
        if self.verdict is None:
            return None
        return self.verdict.model_copy(update={"report": without_keys(self.verdict.report)})

    def _archive(self) -> bytes | None:
        self._artifacts.add_directory(self.shop.sessions_dir / self.name / "logs", "logs")
        self._artifacts.add_directory(self.kept, "evaluation")
        return self._artifacts.archive()

    def clear_away(self) -> None:
        """Remove what is left of the session on this machine, once all of it is stored."""
        self.capture.unlink(missing_ok=True)
        sandboxes = self.shop.sessions_dir
        for directory in (self.kept, sandboxes / self.name, *sandboxes.glob(f"{self.name}.*")):
            shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """This node has nothing more to do with the session, whether there is a result or not."""
        self._span.end(None)

    def untold(self) -> tuple[StageEntry, ...]:
        """Stages entered that the server has not heard of."""
        now = time.monotonic()
        return tuple(StageEntry(status=status, seconds_ago=now - at) for status, at in self._untold)

    def told(self, count: int) -> None:
        """The server has heard of the first so many."""
        del self._untold[:count]

    def _enter(self, status: SessionStatus) -> None:
        self._close_stage()
        self.status = status
        self._span.enter(status)
        self._untold.append((status, self._entered))
        self.changed()

    def _close_stage(self) -> None:
        now = time.monotonic()
        spent = now - self._entered
        self._seconds[self.status] = self._seconds.get(self.status, 0.0) + spent
        self.shop.metrics.stage(self.status, spent)
        self._entered = now


@asynccontextmanager
async def _budget(seconds: float, name: str) -> AsyncIterator[None]:
    """A deadline whose end is an error that names the budget."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BudgetExceeded(f"budgets.{name} ({seconds:g} s) is used up") from None
