"""The policy that engines are to sample with, and how far each node is with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from polar.errors import Conflict
from polar.models.policy import NodePolicy, Pause, PauseMode, PolicyOrder, PolicyReport, PolicyView, Weights
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
    newest: int
    """The highest version ever asked for. No other weights ever get its number: an engine that was out of
    reach may have them under it."""
    failure: str | None = None
    """Why it is not the version, where no node could load it."""
    fallback: Weights | None = None
    """What nodes go back to if none of them can load these weights; None: one of them has."""
    mode: PauseMode | None = None
    """Set while there is a pause, as are its holder and its end."""
    holder: str | None = None
    expires_at: float | None = None

    @property
    def is_paused(self) -> bool:
        return self.mode is not None

    def resumed(self) -> Wanted:
        return replace(self, step=self.step + 1, mode=None, holder=None, expires_at=None)

    def updated(self, version: int, path: str | None) -> Wanted:
        fallback = self.fallback or Weights(version=self.version, path=self.path)
        return replace(
            self,
            step=self.step + 1,
            version=version,
            path=path,
            newest=version,
            failure=None,
            fallback=fallback,
        )

    def judged(self, nodes: tuple[NodePolicy, ...]) -> Wanted:
        """Kept once one of the live nodes has loaded the weights, and given up once none of them can."""
        if self.fallback is None or not nodes:
            return self
        if any(node.is_settled and node.version == self.version for node in nodes):
            return replace(self, fallback=None)
        if any(node.error is None for node in nodes):
            return self
        return replace(
            self,
            step=self.step + 1,
            version=self.fallback.version,
            path=self.fallback.path,
            failure="; ".join(f"{node.node}: {node.error}" for node in nodes),
            fallback=None,
        )


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
            raised = now.newest + 1 if version is None else version
            if raised <= now.newest:
                raise Conflict(f"version {now.newest} was asked for already", hint="versions only rise")
            return now.updated(raised, path)

        return await self._change(updated)

    async def report(self, node: str, report: PolicyReport) -> bool:
        """Take down how far a node is; whether all are to go back, since no node can load the weights.

        That is decided here, and not by whoever waits for an update: it may be gone by then.
        """
        row = {
            "node": node,
            "step": report.step,
            "version": report.version,
            "error": report.error,
            "seen_at": self._database.now(),
        }

        def write(connection: Connection) -> bool:
            connection.execute(delete(policy_nodes).where(policy_nodes.c.node == node))
            if not report.leaves:
                connection.execute(insert(policy_nodes).values(row))
            if _read(connection, for_update=False).fallback is None:
                return False
            now = _read(connection, for_update=True)
            judged = now.judged(_node_policies(self._reports(connection), now))
            _write(connection, judged)
            return judged.step != now.step

        return await self._database.write(write)

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
        # Ends a pause whose time is over.
        await self.wanted()
        wanted, nodes = await self._database.read(self._seen)
        return PolicyView(
            version=wanted.version,
            path=wanted.path,
            is_paused=wanted.is_paused,
            mode=wanted.mode,
            holder=wanted.holder,
            seconds_left=self._left(wanted),
            newest=wanted.newest,
            fallback=wanted.fallback,
            failure=wanted.failure,
            nodes=nodes,
        )

    def _seen(self, connection: Connection) -> tuple[Wanted, tuple[NodePolicy, ...]]:
        # In this order, what is wanted is never older than what the nodes have done.
        reports = self._reports(connection)
        wanted = _read(connection, for_update=False)
        return wanted, _node_policies(reports, wanted)

    def _reports(self, connection: Connection) -> Sequence[Row[Any]]:
        """The last reports of the live nodes."""
        alive = policy_nodes.c.seen_at > self._database.now() - SILENT_SECONDS
        return connection.execute(select(policy_nodes).where(alive).order_by(policy_nodes.c.node)).all()

    async def _change(self, change: Callable[[Wanted], Wanted]) -> Wanted:
        def write(connection: Connection) -> Wanted:
            found = _read(connection, for_update=True)
            changed = change(found.resumed() if self._is_over(found) else found)
            if changed != found:
                _write(connection, changed)
            return changed

        return await self._database.write(write)

    def _is_over(self, wanted: Wanted) -> bool:
        return wanted.expires_at is not None and wanted.expires_at <= self._database.now()

    def _left(self, wanted: Wanted) -> float | None:
        return None if wanted.expires_at is None else max(wanted.expires_at - self._database.now(), 0.0)


def _node_policies(reports: Sequence[Row[Any]], wanted: Wanted) -> tuple[NodePolicy, ...]:
    return tuple(
        NodePolicy(
            node=row.node,
            version=row.version,
            is_settled=row.step >= wanted.step and row.error is None,
            error=row.error if row.step >= wanted.step else None,
        )
        for row in reports
    )


def _refuse_others(now: Wanted, holder: str | None) -> None:
    if now.is_paused and now.holder != holder:
        raise Conflict(f"the policy is paused by {now.holder!r}", hint="`polar policy resume` ends the pause")


def _read(connection: Connection, *, for_update: bool) -> Wanted:
    query = select(policy).with_for_update() if for_update else select(policy)
    row = connection.execute(query).one()
    return Wanted(
        step=row.step,
        version=row.version,
        path=row.path,
        newest=row.newest,
        failure=row.failure,
        fallback=_fallback(row),
        mode=PauseMode(row.mode) if row.mode is not None else None,
        holder=row.holder,
        expires_at=row.expires_at,
    )


def _fallback(row: Row[Any]) -> Weights | None:
    if row.fallback_version is None:
        return None
    return Weights(version=row.fallback_version, path=row.fallback_path)


def _write(connection: Connection, wanted: Wanted) -> None:
    connection.execute(
        update(policy).values(
            step=wanted.step,
            version=wanted.version,
            path=wanted.path,
            newest=wanted.newest,
            failure=wanted.failure,
            fallback_version=wanted.fallback.version if wanted.fallback else None,
            fallback_path=wanted.fallback.path if wanted.fallback else None,
            mode=wanted.mode.value if wanted.mode else None,
            holder=wanted.holder,
            expires_at=wanted.expires_at,
        )
    )
