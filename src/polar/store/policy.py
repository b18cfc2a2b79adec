"""The policy that engines are to sample with, and how far each node is with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select, update

from polar.errors import Conflict
from polar.models.component import view
from polar.models.policy import NodePolicy, Pause, PauseMode, PolicyOrder, PolicyReport, PolicyView, Weights
from polar.store.database import Repository, writes
from polar.store.tables import policy, policy_nodes

SILENT_SECONDS = 20.0
"""A node that reports less often is not waited for: it asks every ten seconds, or as soon as it is done."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every node is to bring its engine to: the row of the table `policy`."""

    step: int
    """Rises with every change."""
    version: int
    path: str | None
    newest: int
    """The highest version ever asked for. No other weights ever get its number: an engine that was out of
    reach may have them under it."""
    failure: str | None
    """Why it is not the version, where no node could load it."""
    fallback_version: int | None
    fallback_path: str | None
    """What nodes go back to if none of them can load these weights; no version: one of them has."""
    mode: PauseMode | None
    """Set while there is a pause, as are its holder and its end."""
    holder: str | None
    expires_at: float | None

    @property
    def is_paused(self) -> bool:
        return self.mode is not None

    @property
    def fallback(self) -> Weights | None:
        if self.fallback_version is None:
            return None
        return Weights(version=self.fallback_version, path=self.fallback_path)

    def resumed(self) -> Wanted:
        return replace(self, step=self.step + 1, mode=None, holder=None, expires_at=None)

    def updated(self, version: int, path: str | None) -> Wanted:
        updated = replace(self, step=self.step + 1, version=version, path=path, newest=version, failure=None)
        if self.fallback_version is not None:
            return updated
        return replace(updated, fallback_version=self.version, fallback_path=self.path)

    def judged(self, nodes: tuple[NodePolicy, ...]) -> Wanted:
        """Kept once one of the live nodes has loaded the weights, and given up once none of them can."""
        if self.fallback_version is None or not nodes:
            return self
        settled = replace(self, fallback_version=None, fallback_path=None)
        if any(node.is_settled and node.version == self.version for node in nodes):
            return settled
        if any(node.error is None for node in nodes):
            return self
        return replace(
            settled,
            step=self.step + 1,
            version=self.fallback_version,
            path=self.fallback_path,
            failure="; ".join(f"{node.node}: {node.error}" for node in nodes),
        )


class Policies(Repository):
    """One policy, wanted by a trainer and followed by nodes. A pause that has expired is none."""

    async def wanted(self) -> Wanted:
        """What is asked for now."""
        found = await self._database.read(_read)
        return await self._end_pause() if self._is_over(found) else found

    @writes
    def _end_pause(self, connection: Connection) -> Wanted:
        return self._current(connection)

    @writes
    def pause(self, connection: Connection, asked: Pause) -> Wanted:
        """Begin a pause or renew it; Conflict if somebody else holds one."""
        now = self._current(connection)
        _refuse_others(now, asked.holder)
        paused = replace(
            now,
            step=now.step if now.mode is asked.mode else now.step + 1,
            mode=asked.mode,
            holder=asked.holder,
            expires_at=self._database.now() + asked.timeout_seconds,
        )
        return _write(connection, paused)

    @writes
    def resume(self, connection: Connection, holder: str | None) -> Wanted:
        """End a pause, by its holder or, with None, whoever that is."""
        now = self._current(connection)
        if holder is not None:
            _refuse_others(now, holder)
        return _write(connection, now.resumed()) if now.is_paused else now

    @writes
    def update(
        self, connection: Connection, path: str | None, version: int | None, holder: str | None
    ) -> Wanted:
        """Want other weights; Conflict while somebody else pauses, or if the version does not rise."""
        now = self._current(connection)
        _refuse_others(now, holder)
        raised = now.newest + 1 if version is None else version
        if raised <= now.newest:
            raise Conflict(f"version {now.newest} was asked for already", hint="versions only rise")
        return _write(connection, now.updated(raised, path))

    @writes
    def report(self, connection: Connection, node: str, report: PolicyReport) -> bool:
        """Take down how far a node is; whether all are to go back, since no node can load the weights.

        That is decided here, and not by whoever waits for an update: it may be gone by then.
        """
        connection.execute(delete(policy_nodes).where(policy_nodes.c.node == node))
        if not report.leaves:
            row = report.model_dump(include={"step", "version", "error"})
            seen_at = self._database.now()
            connection.execute(insert(policy_nodes).values(node=node, seen_at=seen_at, **row))
        if _read(connection).fallback_version is None:
            return False
        now = _read(connection, for_update=True)
        judged = _write(connection, now.judged(_node_policies(self._reports(connection), now)))
        return judged.step != now.step

    async def order(self) -> PolicyOrder:
        """What nodes are to do."""
        wanted = await self.wanted()
        mode = wanted.mode or PauseMode.KEEP
        return view(PolicyOrder, wanted, mode=mode, seconds_left=self._left(wanted))

    async def view(self) -> PolicyView:
        """What is asked for, and how far the live nodes are."""
        await self.wanted()  # Ends a pause whose time is over.
        return await self._database.read(self._view)

    def _view(self, connection: Connection) -> PolicyView:
        # In this order, what is wanted is never older than what the nodes have done.
        reports = self._reports(connection)
        wanted = _read(connection)
        nodes = _node_policies(reports, wanted)
        return view(PolicyView, wanted, seconds_left=self._left(wanted), nodes=nodes)

    def _reports(self, connection: Connection) -> Sequence[Row[Any]]:
        """The last reports of the live nodes."""
        is_heard = policy_nodes.c.seen_at > self._database.now() - SILENT_SECONDS
        return connection.execute(select(policy_nodes).where(is_heard).order_by(policy_nodes.c.node)).all()

    def _current(self, connection: Connection) -> Wanted:
        """What is wanted, locked, after ending a pause whose time is over."""
        found = _read(connection, for_update=True)
        return _write(connection, found.resumed()) if self._is_over(found) else found

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


def _read(connection: Connection, *, for_update: bool = False) -> Wanted:
    query = select(*(policy.c[field.name] for field in fields(Wanted)))
    found = Wanted(*connection.execute(query.with_for_update() if for_update else query).one())
    return replace(found, mode=PauseMode(found.mode) if found.mode else None)


def _write(connection: Connection, wanted: Wanted) -> Wanted:
    connection.execute(update(policy).values(asdict(wanted)))
    return wanted
