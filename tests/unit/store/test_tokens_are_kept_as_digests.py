"""Tokens in the store: of the secret only a digest, one live token a name, and ends that hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from polar.errors import Conflict, NotFound
from polar.models.access import NewToken, TokenRole, TokenState
from polar.store.store import Store
from polar.store.tables import tokens
from polar.store.tokens import digest, id_in
from tests.fakes.control_plane import Clock


async def states(store: Store) -> list[tuple[str, TokenState]]:
    return [(view.name, view.state) for view in await store.tokens.all()]


async def test_the_secret_is_not_in_the_database(store: Store, tmp_path: Path) -> None:
    made = await store.tokens.create(NewToken(name="alice", role=TokenRole.TRAINER))
    assert len(made.token) > 70
    assert made.token not in repr(made)
    (row,) = await store.database.read(lambda connection: connection.execute(select(tokens)).all())
    assert made.token not in str(row)
    assert made.token.split("_")[2] not in str(row)
    assert row.digest == digest(made.token)
    assert id_in(made.token) == made.view.id == row.id
    found = await store.tokens.find(made.view.id)
    assert found is not None
    assert (found.name, found.role, found.digest) == ("alice", TokenRole.TRAINER, digest(made.token))


async def test_a_name_has_one_live_token(store: Store, clock: Clock) -> None:
    await store.tokens.create(NewToken(name="alice", role=TokenRole.TRAINER, expires_seconds=10))
    with pytest.raises(Conflict, match="a token named 'alice'"):
        await store.tokens.create(NewToken(name="alice", role=TokenRole.ADMIN))
    with pytest.raises(Conflict, match="the data directory's own token"):
        await store.tokens.create(NewToken(name="owner", role=TokenRole.NODE))
    clock.now += 10
    await store.tokens.create(NewToken(name="alice", role=TokenRole.NODE))
    assert await states(store) == [("alice", TokenState.EXPIRED), ("alice", TokenState.LIVE)]


async def test_revoking_ends_one_by_id_or_by_name(store: Store) -> None:
    first = await store.tokens.create(NewToken(name="alice", role=TokenRole.NODE))
    await store.tokens.create(NewToken(name="bob", role=TokenRole.NODE))
    assert [view.id for view in await store.tokens.revoke(first.view.id)] == [first.view.id]
    assert await store.tokens.find(first.view.id) is None
    second = await store.tokens.create(NewToken(name="alice", role=TokenRole.NODE))
    assert [view.id for view in await store.tokens.revoke("alice")] == [second.view.id]
    assert [state for _, state in await states(store)] == [
        TokenState.REVOKED,
        TokenState.LIVE,
        TokenState.REVOKED,
    ]
    for gone in ("alice", "nobody"):
        with pytest.raises(NotFound):
            await store.tokens.revoke(gone)
