"""One leased session on its way from sandbox to result."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from polar import plugins
from polar.engines.base import ModelInfo
from polar.errors import NotInstalled, PolarError
from polar.evaluators.base import EvaluationContext, Evaluator
from polar.gateway.capture import read_capture
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.harnesses.base import Harness, HarnessContext, Installation
from polar.models.session import (
    AgentEnd,
    Lease,
    SessionResult,
    SessionStatus,
    StageSeconds,
    TrajectoryStats,
    Verdict,
)
from polar.models.trace import Trajectory
from polar.node.installations import Installations
from polar.node.pools import Pools, Seat
from polar.runtimes.base import Runtime, Sandbox, SandboxError, SandboxSpec
from polar.trajectory import recording
from polar.trajectory.base import Builder

log = logging.getLogger(__name__)

STAGES = (SessionStatus.INIT, SessionStatus.READY, SessionStatus.RUNNING, SessionStatus.POSTRUN)
DEFAULT_MAX_TOKENS = 4096
"""How long one answer may be where the task does not say."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """What the sessions of a node share."""

    pools: Pools
    gateway: Gateway
    model: ModelInfo
    installations: Installations
    runtimes: tuple[str, ...]
    sessions_dir: Path
    """One directory a session: its sandbox while it lives, its logs after."""
    captures_dir: Path
    """One log a session, until its recording is stored; outside the sandboxes, which are reaped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished session: its result, and its recording if anything was captured."""

    result: SessionResult
    recording: bytes | None


@dataclass(slots=True)
class AgentRun:
    """What is known of the harness's run; filled in as it happens, so that a late failure keeps it."""

    end: AgentEnd = AgentEnd.NOT_STARTED
    exit_code: int | None = None
    harness_version: str | None = None


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
    _entered: float = field(default_factory=time.monotonic)
    _seconds: dict[SessionStatus, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of this attempt's directory and capture."""
        return f"{self.lease.session_id}.{self.lease.attempt}"

    @property
    def capture(self) -> Path:
        return self.shop.captures_dir / f"{self.name}.log"

    async def run(self, seat: Seat) -> Outcome:
        """Take the session through its stages; a failure on the way is part of the outcome."""
        try:
            await self._stages(seat)
        except PolarError as error:
            return self._outcome(SessionStatus.FAILED, str(error))
        except Exception as error:
            log.exception("session %s failed in %s", self.lease.session_id, self.status)
            return self._outcome(SessionStatus.FAILED, f"internal error in {self.status}: {error!r}")
        return self._outcome(SessionStatus.COMPLETED)

    async def _stages(self, seat: Seat) -> None:
        async with self._sandbox() as (sandbox, harness, installation):
            self._enter(SessionStatus.READY)
            await seat.move(self.shop.pools.run)
            self._enter(SessionStatus.RUNNING)
            await self._run_agent(sandbox, harness, installation)
            await seat.move(self.shop.pools.postrun)
            self._enter(SessionStatus.POSTRUN)
            self.trajectory = self._build()
            self.verdict = await self._evaluate(sandbox, self.trajectory.stats)

    @asynccontextmanager
    async def _sandbox(self) -> AsyncIterator[tuple[Sandbox, Harness, Installation]]:
        """INIT: the sandbox with the task's files in it; stopped whatever happens after."""
        task = self.lease.task
        async with AsyncExitStack() as stack:
            async with self.shop.pools.init, _budget(task.budgets.init_seconds, "init_seconds"):
                runtime = await self._runtime()
                harness: Harness = plugins.create("harnesses", "harness", task.harness)
                installation = await self.shop.installations.get(task.harness.name, harness)
                self.agent.harness_version = installation.version
                sandbox = await runtime.start(
                    SandboxSpec(
                        session_id=self.lease.session_id,
                        root=self.shop.sessions_dir / self.name,
                        gateway_host=self.shop.gateway.host,
                        gateway_port=self.shop.gateway.port,
                        mounts=installation.mounts,
                    )
                )
                stack.push_async_callback(self._stop, sandbox)
                for path, content in task.files.items():
                    await sandbox.upload(
                        sandbox.workspace / path, content.data, executable=content.executable
                    )
            yield sandbox, harness, installation

    async def _stop(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.stop()
        except SandboxError:
            log.exception("session %s: its sandbox could not be cleared away", self.lease.session_id)

    async def _runtime(self) -> Runtime:
        component = self.lease.task.runtime
        if component.name not in self.shop.runtimes:
            raise NotInstalled(
                f"runtime {component.name!r} is not allowed on this node",
                hint=f"allowed: {', '.join(self.shop.runtimes)} (setting node.runtimes)",
            )
        runtime: Runtime = plugins.create("runtimes", "runtime", component)
        reason = await runtime.unavailable()
        if reason:
            raise NotInstalled(f"runtime {component.name!r} does not work on this machine: {reason}")
        return runtime

    async def _run_agent(self, sandbox: Sandbox, harness: Harness, installation: Installation) -> None:
        """RUNNING: the harness against the gateway, until it ends or a budget ends it."""
        task, gateway = self.lease.task, self.shop.gateway
        key = new_key()
        context = HarnessContext(
            instruction=task.instruction,
            model=self.shop.model.name,
            gateway_url=sandbox.gateway_url,
            key=key,
            workspace=sandbox.workspace,
            home=sandbox.home,
            tmp=sandbox.tmp,
            max_context=task.budgets.max_context_tokens or self.shop.model.max_context,
            max_tokens=task.sampling.max_tokens or min(DEFAULT_MAX_TOKENS, self.shop.model.max_context // 2),
            paths={mount.target: sandbox.path_inside(mount) for mount in installation.mounts},
        )
        for path, data in harness.files(context).items():
            await sandbox.upload(path, data)
        gateway.open_session(
            SessionGrant(
                session_id=self.lease.session_id,
                key=key,
                capture=self.capture,
                sampling=task.sampling,
                budgets=task.budgets,
                sample=self.lease.sample,
            )
        )
        try:
            await self._exec_agent(sandbox, harness, context)
        finally:
            await gateway.close_session(self.lease.session_id)
            await sandbox.kill()

    async def _exec_agent(self, sandbox: Sandbox, harness: Harness, context: HarnessContext) -> None:
        budget = asyncio.create_task(self.shop.gateway.budget_spent(self.lease.session_id))
        agent = asyncio.create_task(
            sandbox.exec(
                harness.command(context), timeout=self.lease.task.budgets.run_seconds, log_name="agent"
            )
        )
        self.agent.end = AgentEnd.CANCELLED
        try:
            await asyncio.wait({agent, budget}, return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                self.agent.end = AgentEnd.BUDGET
                return
            result = agent.result()
            self.agent.end = AgentEnd.TIMEOUT if result.timed_out else AgentEnd.EXITED
            self.agent.exit_code = result.exit_code
        finally:
            for task in (agent, budget):
                task.cancel()
            await asyncio.gather(agent, budget, return_exceptions=True)

    def _build(self) -> Trajectory:
        builder: Builder = plugins.create("builders", "builder", self.lease.task.builder)
        return builder.build(read_capture(self.capture) if self.capture.exists() else [])

    async def _evaluate(self, sandbox: Sandbox, stats: TrajectoryStats) -> Verdict:
        task = self.lease.task
        evaluator: Evaluator = plugins.create("evaluators", "evaluator", task.evaluator)
        seconds = task.budgets.evaluate_seconds
        async with _budget(seconds, "evaluate_seconds"):
            return await evaluator.evaluate(
                EvaluationContext(task=task, sandbox=sandbox, stats=stats, timeout=seconds)
            )

    def cancelled(self) -> Outcome:
        """The outcome of a session that its user called off: what was captured is kept."""
        return self._outcome(SessionStatus.CANCELLED)

    def _outcome(self, status: SessionStatus, error: str | None = None) -> Outcome:
        self._close_stage()
        try:
            trajectory = self.trajectory or self._build()
        except (PolarError, ValueError) as problem:
            log.exception("session %s: its capture cannot be read", self.lease.session_id)
            trajectory = Trajectory((), ())
            error = "; ".join(filter(None, [error, f"its capture cannot be read: {problem}"]))
        if self.verdict is not None:
            trajectory = trajectory.with_reward(self.verdict.reward)
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
            error=error,
            verdict=self.verdict,
            stats=trajectory.stats,
            seconds=StageSeconds(**{stage: self._seconds.get(stage, 0.0) for stage in STAGES}),
            policy_version_min=min(versions, default=None),
            policy_version_max=max(versions, default=None),
            harness_version=self.agent.harness_version,
            model=self.shop.model.name,
            logprobs_mode=self.shop.model.logprobs_mode,
            has_recording=bool(trajectory.segments),
        )
        if not result.has_recording:
            return Outcome(result, None)
        return Outcome(result, recording.encode(self.capture.read_bytes(), trajectory, result))

    def _enter(self, status: SessionStatus) -> None:
        self._close_stage()
        self.status = status
        self.changed()

    def _close_stage(self) -> None:
        now = time.monotonic()
        self._seconds[self.status] = self._seconds.get(self.status, 0.0) + now - self._entered
        self._entered = now


@asynccontextmanager
async def _budget(seconds: float, name: str) -> AsyncIterator[None]:
    """A deadline whose end is an error that names the budget."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise BudgetExceeded(f"budgets.{name} ({seconds:g} s) is used up") from None


class BudgetExceeded(PolarError):
    """A stage took longer than its budget."""
