"""Retention: removes orphans, which are blobs that belong to no result, and what has expired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Connection, delete, exists, func, select

from polar.store.blobs import BlobName, Blobs
from polar.store.database import batches
from polar.store.sessions import IS_OPEN, LEASED
from polar.store.store import Store
from polar.store.tables import captures, events, results, sessions

_ROWS_AT_ONCE = 5_000
"""Rows deleted by one transaction, so that writers wait little."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How many seconds each is kept after its session ended; None: for ever."""

    recordings: float | None = None
    artifacts: float | None = None
    events: float | None = None
    orphans: float = 86_400.0
    """How long what a fenced-off lease delivered stays for inspection."""


@dataclass(frozen=True, slots=True)
class Swept:
    """How much was removed."""

    recordings: int = 0
    artifacts: int = 0
    orphans: int = 0
    events: int = 0
    captures: int = 0


async def sweep(store: Store, keep: Retention) -> Swept:
    """Remove what has expired; safe beside nodes that deliver and servers that sweep too."""
    recordings, lost_recordings = await _sweep_blobs(store, store.recordings, keep.recordings, keep.orphans)
    artifacts, lost_artifacts = await _sweep_blobs(store, store.artifacts, keep.artifacts, keep.orphans)
    dropped = await _sweep_events(store, keep.events)
    captured = await store.database.write(_drop_captures)
    return Swept(recordings, artifacts, lost_recordings + lost_artifacts, dropped, captured)


def _drop_captures(connection: Connection) -> int:
    """Drop what is left of sessions that have ended, should there be something: they drop it themselves."""
    has_ended = exists().where(sessions.c.id == captures.c.session_id, ~IS_OPEN)
    return connection.execute(delete(captures).where(has_ended)).rowcount


async def _sweep_blobs(store: Store, blobs: Blobs, keep: float | None, grace: float) -> tuple[int, int]:
    """How many blobs of results had expired, and how many were orphans."""
    now = store.database.now()
    found = await blobs.found()
    old: list[BlobName] = []
    orphaned: list[BlobName] = []
    for batch in batches(list(found)):
        ended, held, begun_with = await store.database.read(partial(_known, batch=batch))
        for name in batch:
            at = found[name]
            if name in ended:
                if keep is not None and ended[name] < now - keep and name.session_id not in begun_with:
                    old.append(name)
            # A lease that has ended never comes back: what it delivered can become no one's result.
            elif name not in held and (at is None or at < now - grace):
                orphaned.append(name)
    await blobs.remove([*old, *orphaned])
    await blobs.remove_broken_uploads()
    return len(old), len(orphaned)


def _known(
    connection: Connection, batch: Sequence[BlobName]
) -> tuple[dict[BlobName, float], frozenset[BlobName], frozenset[str]]:
    """The names that belong to a result, and when it was stored; those under which a node may deliver now;
    the sessions whose recorded answers another one has still to begin with."""
    ids = {name.session_id for name in batch}
    # First what is held: what a node delivers between the two is then found among the results.
    held = connection.execute(
        select(sessions.c.id, sessions.c.fencing_token).where(
            sessions.c.id.in_(ids), sessions.c.status.in_(LEASED)
        )
    ).all()
    ended = connection.execute(
        select(results.c.session_id, results.c.fencing_token, results.c.created_at).where(
            results.c.session_id.in_(ids)
        )
    )
    begun_with = connection.execute(
        select(sessions.c.origin_id).where(sessions.c.origin_id.in_(ids), IS_OPEN)
    )
    return (
        {BlobName(id, token): at for id, token, at in ended},
        frozenset(BlobName(*row) for row in held),
        frozenset(begun_with.scalars()),
    )


async def _sweep_events(store: Store, keep: float | None) -> int:
    """Drop the oldest rows; a cursor goes on from where it was."""
    if keep is None:
        return 0
    dropped = 0
    before = store.database.now() - keep

    def change(connection: Connection) -> int:
        oldest = select(events.c.seq).order_by(events.c.seq).limit(_ROWS_AT_ONCE).subquery()
        last = connection.execute(select(func.max(oldest.c.seq))).scalar_one()
        if last is None:
            return 0
        return connection.execute(delete(events).where(events.c.seq <= last, events.c.at < before)).rowcount

    while (count := await store.database.write(change)) > 0:
        dropped += count
    return dropped
