"""Policy updates: what trainers ask for becomes an order that every node follows, and is waited for.

A node asks for its order again and again, telling what it has done; the answer is held back until there is
something new. So an order reaches nodes within milliseconds, nothing connects to them, and one that joins
late or starts anew is brought to the same weights.
"""

from __future__ import annotations

import logging

from polar.errors import Unavailable
from polar.models.policy import Pause, PolicyOrder, PolicyReport, PolicyView, Resume, Update
from polar.models.views import ResultPage
from polar.rollout.long_poll import Gone, Notifier
from polar.store.policy import Policies

log = logging.getLogger(__name__)


class PolicyService:
    """Keeps nothing in memory but who waits; several servers may share a store."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._changed = Notifier()
        self._reported = Notifier()

    async def view(self) -> PolicyView:
        return await self._policies.view()

    async def pause(self, asked: Pause, gone: Gone) -> PolicyView:
        """Pause or renew; answered once every live node samples nothing, or after the time for that."""
        await self._policies.pause(asked)
        return await self._settled(asked.wait_seconds, gone)

    async def resume(self, asked: Resume, gone: Gone) -> PolicyView:
        await self._policies.resume(asked.holder)
        return await self._settled(asked.wait_seconds, gone)

    async def update(self, asked: Update, gone: Gone) -> PolicyView:
        """Replace the weights. A node that cannot samples nothing; if none can, the old ones stay."""
        wanted = await self._policies.update(asked.path, asked.version, asked.holder)
        view = await self._settled(asked.wait_seconds, gone)
        if view.version < wanted.version:
            raise Unavailable(
                f"version {wanted.version} could not be loaded, version {view.version} stays: {view.failure}"
            )
        for node in view.nodes:
            if node.error is not None:
                log.error("%s samples nothing without version %d: %s", node.node, view.version, node.error)
        return view

    async def follow(self, node: str, report: PolicyReport, gone: Gone) -> PolicyOrder:
        """Take a node's report, and give it its next order; waits for a new one."""
        if await self._policies.report(node, report):
            self._changed.notify()
        self._reported.notify()
        return await self._changed.long_poll(
            self._policies.order, lambda order: order.step != report.step, report.wait_seconds, gone
        )

    def stop_waiting(self) -> None:
        self._changed.close()
        self._reported.close()

    async def _settled(self, wait_seconds: float, gone: Gone) -> PolicyView:
        """The policy once every live node has done what is asked, or failed, or the time is over."""
        self._changed.notify()
        return await self._reported.long_poll(
            self._policies.view,
            lambda view: all(node.is_settled or node.error is not None for node in view.nodes),
            wait_seconds,
            gone,
        )


def mark_stale(page: ResultPage, version: int, max_staleness: int | None) -> ResultPage:
    """The page, which names the results with tokens of a policy more than `max_staleness` versions old."""
    stale: tuple[str, ...] = ()
    if max_staleness is not None:
        oldest = version - max_staleness
        stale = tuple(
            result.session_id
            for result in page.results
            if result.policy_version_min is not None and result.policy_version_min < oldest
        )
    return page.model_copy(update={"policy_version": version, "stale": stale})
