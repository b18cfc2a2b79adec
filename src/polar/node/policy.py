"""Keeps a node's engine as the server orders: paused or not, and with which weights."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from polar.client import AsyncClient
from polar.engines.base import WeightUpdate
from polar.errors import InvalidInput, NotFound, PolarError, Unavailable
from polar.gateway.server import Gateway
from polar.models.policy import PolicyOrder, PolicyReport

log = logging.getLogger(__name__)

WAIT_SECONDS = 10.0
"""How long the server holds an answer back; a node that reports less often counts as silent."""
RETRY_SECONDS = 1.0
"""Between attempts to reach the server, or to do what failed."""
LEAVE_SECONDS = 3.0
"""How long a node that stops tries to leave no pause and no report behind."""
SHARED_MEMORY = Path("/dev/shm")


class PolicyFollower:
    """Follows orders until it is cancelled. An order that cannot be followed keeps the gateway closed."""

    def __init__(
        self, node: str, client: AsyncClient, gateway: Gateway, weight_roots: Sequence[Path]
    ) -> None:
        self._node = node
        self._client = client
        self._gateway = gateway
        self._roots = [os.path.realpath(root) for root in weight_roots]
        self._report = PolicyReport()
        self._is_ours = False
        """Whether the engine's number is of this system: all count from 1, and engines outlive systems."""
        self._released_at: float | None = None
        """When, by the monotonic clock, the pause ends even if the server is not heard of again."""

    async def run(self) -> None:
        try:
            while True:
                await self._follow()
        finally:
            await self._leave()

    async def _follow(self) -> None:
        try:
            order = await self._client.follow_policy(self._node, self._next_report())
        except NotFound:
            log.warning("the server knows no policy updates: this node follows none")
            await asyncio.Event().wait()
        except PolarError as error:
            log.warning("could not ask for the policy, trying again in %g s: %s", RETRY_SECONDS, error)
            await self._release_if_over()
            await asyncio.sleep(RETRY_SECONDS)
        else:
            await self._obey_audibly(order)

    async def _obey_audibly(self, order: PolicyOrder) -> None:
        """However long it takes, the server hears that this node is running and not done yet."""
        obeying = asyncio.create_task(self._obey(order))
        try:
            while not (await asyncio.wait({obeying}, timeout=WAIT_SECONDS))[0]:
                try:
                    report = self._report.model_copy(update={"wait_seconds": 0.0})
                    await self._client.follow_policy(self._node, report)
                except PolarError as error:
                    log.warning("could not tell how far the policy is followed: %s", error)
            await obeying
        finally:
            obeying.cancel()
            await asyncio.wait({obeying})

    def _next_report(self) -> PolicyReport:
        wait = WAIT_SECONDS if self._report.error is None else RETRY_SECONDS
        if self._report.step < 0:
            wait = 0.0
        if self._released_at is not None:
            wait = min(wait, max(self._released_at - time.monotonic(), 0.0))
        return self._report.model_copy(update={"wait_seconds": wait})

    async def _obey(self, order: PolicyOrder) -> None:
        left = order.seconds_left
        self._released_at = None if left is None else time.monotonic() + left
        if order.step == self._report.step and self._report.error is None:
            return
        error: str | None = None
        try:
            await self._bring_to(order)
        except PolarError as problem:
            error = str(problem)[:2000]
            if error != self._report.error:
                # That an engine is not there is told by those who need it; here it is tried again.
                level = logging.DEBUG if isinstance(problem, Unavailable) else logging.ERROR
                log.log(level, "model calls wait for policy version %d: %s", order.version, error)
        except Exception as problem:
            log.exception("policy version %d", order.version)
            error = f"internal error: {problem!r}"[:2000]
        self._report = PolicyReport(step=order.step, version=await self._version(), error=error)

    async def _bring_to(self, order: PolicyOrder) -> None:
        is_unknown = order.version > 0 and not self._is_ours
        is_behind = is_unknown or await self._gateway.policy_version() != order.version
        if (order.is_paused or is_behind) and not self._gateway.is_paused:
            await self._gateway.pause(order.mode)
        if is_behind:
            self._refuse_other_places(order.path)
            await self._gateway.update_weights(WeightUpdate(order.version, order.path))
            log.info("policy version %d from %s", order.version, order.path or "the engine's own weights")
        self._is_ours = True
        if not order.is_paused:
            await self._gateway.resume()

    def _refuse_other_places(self, path: str | None) -> None:
        if path is None:
            return
        real = os.path.realpath(path)
        if not any(os.path.commonpath([root, real]) == root for root in self._roots):
            raise InvalidInput(
                f"{path} is not below a directory that this node takes weights from",
                hint=f"write them below {self._roots[0]}, or name the directory in node.weight_roots",
            )

    async def _version(self) -> int:
        try:
            return await self._gateway.policy_version()
        except PolarError:
            return self._report.version

    async def _release_if_over(self) -> None:
        is_over = self._released_at is not None and time.monotonic() >= self._released_at
        if not is_over or self._report.error is not None:
            return
        log.warning("the pause is over and the server is not heard of: going on")
        self._released_at = None
        # Should the server come back with the same order, it is to be followed again.
        self._report = self._report.model_copy(update={"step": -1})
        await self._resume()

    async def _resume(self) -> None:
        try:
            await self._gateway.resume()
        except PolarError as error:
            log.warning("the engine could not be resumed: %s", error)

    async def _leave(self) -> None:
        """An engine that outlives the node is not left paused, and nobody waits for the node."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                if self._gateway.is_paused:
                    await self._resume()
                await self._client.follow_policy(self._node, self._report.model_copy(update={"leaves": True}))
        except (Unavailable, NotFound, TimeoutError) as error:
            log.info("left without telling the server: %s", error or type(error).__name__)


def weight_roots(named: Sequence[Path], data_dir: Path) -> list[Path]:
    """Where weights may come from: the data directory and shared memory where nothing is named."""
    return list(named) or [data_dir / "weights", SHARED_MEMORY]
