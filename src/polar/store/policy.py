"""The policy that engines are to sample with, and how far each node is with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import Connection, delete, insert, select, update

from polar.errors import Conflict
from polar.models.policy import NodePolicy, Pause, PauseMode, PolicyOrder, PolicyReport, PolicyView
from polar.store.database import Database
from polar.store.tables import policy, policy_nodes

SILENT_SECONDS = 20.0
"""A node that reports less often is not waited for: it asks every ten seconds, or as soon as it is done."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every node is to bring its engine to."""

    step: int
    """Rises with every change."""
    version: int
    path: str | None
    mode: PauseMode | None = None
    """Set while there is a pause, as are its holder and its end."""
    holder: str | None = None
    expires_at: float | None = None

    @property
    def is_paused(self) -> bool:
        return self.mode is not None

    def resumed(self) -> Wanted:
        return Wanted(self.step + 1, self.version, self.path)


class Policies:
    """One policy, wanted by a trainer and followed by nodes. A pause that has expired is none."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def wanted(self) -> Wanted:
        found = await self._database.read(lambda connection: _read(connection, for_update=False))
        return await self._change(lambda now: now) if self._is_over(found) else found

    async def pause(self, asked: Pause) -> Wanted:
        """Begin a pause or renew it; Conflict if somebody else holds one."""

        def paused(now: Wanted) -> Wanted:
            _refuse_others(now, asked.holder)
            return replace(
                now,
                step=now.step if now.mode is asked.mode else now.step + 1,
                mode=asked.mode,
                holder=asked.holder,
                expires_at=self._database.now() + asked.timeout_seconds,
            )

        return await self._change(paused)

    async def resume(self, holder: str | None) -> Wanted:
        """End a pause, by its holder or, with None, whoever that is."""

        def resumed(now: Wanted) -> Wanted:
            if holder is not None:
                _refuse_others(now, holder)
            return now.resumed() if now.is_paused else now

        return await self._change(resumed)

    async def update(self, path: str | None, version: int | None, holder: str | None) -> Wanted:
        """Want other weights; Conflict while somebody else pauses, or if the version does not rise."""

        def updated(now: Wanted) -> Wanted:
            _refuse_others(now, holder)
            raised = now.version + 1 if version is None else version
            if raised <= now.version:
                raise Conflict(f"the policy has version {now.version} already", hint="versions only rise")
            return replace(now, step=now.step + 1, version=raised, path=path)

        return await self._change(updated)

    async def revert(self, failed: Wanted, before: Wanted) -> Wanted:
        """Want the old weights again, unless other ones are wanted by now."""

        def reverted(now: Wanted) -> Wanted:
            if now.version != failed.version:
                return now
            return replace(now, step=now.step + 1, version=before.version, path=before.path)

        return await self._change(reverted)

    async def report(self, node: str, report: PolicyReport) -> None:
        """Take down how far a node is."""
        row = {
            "node": node,
            "step": report.step,
            "version": report.version,
            "error": report.error,
            "seen_at": self._database.now(),
        }

        def write(connection: Connection) -> None:
            connection.execute(delete(policy_nodes).where(policy_nodes.c.node == node))
            if not report.leaves:
                connection.execute(insert(policy_nodes).values(row))

        await self._database.write(write)

    async def order(self) -> PolicyOrder:
        wanted = await self.wanted()
        return PolicyOrder(
            step=wanted.step,
            version=wanted.version,
            path=wanted.path,
            is_paused=wanted.is_paused,
            mode=wanted.mode or PauseMode.KEEP,
            seconds_left=self._left(wanted),
        )

    async def view(self) -> PolicyView:
        wanted = await self.wanted()
        return PolicyView(
            version=wanted.version,
            path=wanted.path,
            is_paused=wanted.is_paused,
            mode=wanted.mode,
            holder=wanted.holder,
            seconds_left=self._left(wanted),
            nodes=await self._database.read(lambda connection: self._nodes(connection, wanted)),
        )

    def _nodes(self, connection: Connection, wanted: Wanted) -> tuple[NodePolicy, ...]:
        alive = policy_nodes.c.seen_at > self._database.now() - SILENT_SECONDS
        rows = connection.execute(select(policy_nodes).where(alive).order_by(policy_nodes.c.node))
        return tuple(
            NodePolicy(
                node=row.node,
                version=row.version,
                is_settled=row.step >= wanted.step and row.error is None,
                error=row.error if row.step >= wanted.step else None,
            )
            for row in rows
        )

    async def _change(self, change: Callable[[Wanted], Wanted]) -> Wanted:
        def write(connection: Connection) -> Wanted:
            found = _read(connection, for_update=True)
            changed = change(found.resumed() if self._is_over(found) else found)
            if changed != found:
                connection.execute(
                    update(policy).values(
                        step=changed.step,
                        version=changed.version,
                        path=changed.path,
                        mode=changed.mode.value if changed.mode else None,
                        holder=changed.holder,
                        expires_at=changed.expires_at,
                    )
                )
            return changed

        return await self._database.write(write)

    def _is_over(self, wanted: Wanted) -> bool:
        return wanted.expires_at is not None and wanted.expires_at <= self._database.now()

    def _left(self, wanted: Wanted) -> float | None:
        return None if wanted.expires_at is None else max(wanted.expires_at - self._database.now(), 0.0)


def _refuse_others(now: Wanted, holder: str | None) -> None:
    if now.is_paused and now.holder != holder:
        raise Conflict(f"the policy is paused by {now.holder!r}", hint="`polar policy resume` ends the pause")


def _read(connection: Connection, *, for_update: bool) -> Wanted:
    query = select(policy).with_for_update() if for_update else select(policy)
    row = connection.execute(query).one()
    mode = PauseMode(row.mode) if row.mode is not None else None
    return Wanted(row.step, row.version, row.path, mode, row.holder, row.expires_at)
