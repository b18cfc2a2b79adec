"""RUNNING: one harness against the gateway, until it ends or a budget ends it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polar.client.uploader import GrowingCapture
from polar.gateway.playback import Playback
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.harnesses.base import Harness, HarnessContext, Installation, launchers
from polar.models.session import AgentEnd, Lease, ReplayReport
from polar.runtimes.base import Output, Sandbox

if TYPE_CHECKING:
    from polar.node.services import NodeServices

FAR_SECONDS = 10 * 604_800.0
"""The sandbox's own limit, beyond any budget: the session's clock, which a pause stops, ends the agent."""
DEFAULT_MAX_TOKENS = 4096
"""How long one answer may be where the task does not say."""


@dataclass(slots=True)
class AgentRun:
    """What is known of the harness's run; filled in as it happens, so that a late failure keeps it."""

    end: AgentEnd = AgentEnd.NOT_STARTED
    exit_code: int | None = None
    spent_budget: str = ""
    """Which budget ended it, if one did."""
    killed_from_outside: bool = False
    lost_call: bool = False
    """Whether what the model answered could not be recorded, and the agent was told so."""
    stderr: Output | None = None
    """What it wrote there, once it has ended by itself."""
    harness_version: str | None = None
    traceparent: str | None = None
    """The span of its stage, where there are spans."""
    replay: ReplayReport | None = None
    """How far it followed the recording that it began with, if it did."""

    async def run(
        self,
        lease: Lease,
        services: NodeServices,
        sandbox: Sandbox,
        harness: Harness,
        installation: Installation,
        capture: GrowingCapture,
        playback: Playback | None = None,
    ) -> None:
        """Open the session's key, run the harness, and leave no process of it behind."""
        task, gateway = lease.task, services.gateway
        key = new_key()
        context = _context(lease, services, sandbox, installation, key)
        for path, data in {**launchers(context), **harness.files(context)}.items():
            await sandbox.upload(path, data)
        gateway.open_session(
            SessionGrant(
                session_id=lease.session_id,
                key=key,
                capture=capture.path,
                grown=capture.add,
                sampling=task.sampling,
                budgets=task.budgets,
                sample=lease.sample,
                traceparent=self.traceparent,
                serves_any_name=harness.asks_by_any_name,
                deadline_seconds=task.budgets.run_seconds,
                harness_version=self.harness_version,
                playback=playback,
            )
        )
        try:
            await self._exec(lease, gateway, sandbox, harness, context)
        finally:
            self.lost_call = gateway.has_lost_call(lease.session_id)
            self.replay = gateway.replay_report(lease.session_id)
            try:
                await gateway.close_session(lease.session_id)
            finally:
                await sandbox.kill()

    async def _exec(
        self, lease: Lease, gateway: Gateway, sandbox: Sandbox, harness: Harness, context: HarnessContext
    ) -> None:
        budget = asyncio.create_task(gateway.budget_spent(lease.session_id))
        agent = asyncio.create_task(
            sandbox.exec(harness.command(context), timeout=FAR_SECONDS, log_name="agent")
        )
        self.end = AgentEnd.CANCELLED
        try:
            await asyncio.wait({agent, budget}, return_when=asyncio.FIRST_COMPLETED)
            if not agent.done():
                self.end, self.spent_budget = budget.result()
                return
            ended = agent.result()
            self.exit_code, self.stderr = ended.exit_code, ended.stderr
            self.killed_from_outside = ended.killed_from_outside
            self.end = AgentEnd.EXITED
        finally:
            for task in (agent, budget):
                task.cancel()
            await asyncio.gather(agent, budget, return_exceptions=True)


def _context(
    lease: Lease, services: NodeServices, sandbox: Sandbox, installation: Installation, key: str
) -> HarnessContext:
    task, model = lease.task, services.model
    return HarnessContext(
        instruction=task.instruction,
        model=model.name,
        gateway_url=sandbox.gateway_url,
        key=key,
        workspace=sandbox.workspace,
        home=sandbox.home,
        tmp=sandbox.tmp,
        max_context=task.budgets.max_context_tokens or model.max_context,
        max_tokens=task.sampling.max_tokens or min(DEFAULT_MAX_TOKENS, model.max_context // 2),
        paths={tool.target: sandbox.tool_path(tool) for tool in installation.tools},
        tools=task.tools,
    )
