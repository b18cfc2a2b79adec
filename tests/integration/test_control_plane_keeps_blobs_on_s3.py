"""Recordings and artifacts in an object store: whole, fenced, and let go when their time is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from polar.client import AsyncClient
from polar.config.settings import ServerSettings
from polar.errors import NotFound, Unavailable
from polar.models.delivery import Delivery
from polar.models.views import LeaseRequest
from polar.rollout.server import RolloutServer
from polar.store.blobs import BlobName, open_blobs
from polar.store.retention import Retention, Swept, sweep
from polar.store.store import Store
from tests.fakes.control_plane import idle_task, result_of
from tests.fakes.extensions import register_idle_extensions
from tests.s3_server import s3_server

TOKEN = "a token for tests only"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server("polar") as address, pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            environment.setenv(name, value)
        yield "s3://polar"


async def test_session_is_delivered_read_and_let_go(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_idle_extensions(monkeypatch)
    async with (
        Store.open(tmp_path, blobs_url=f"{bucket}/whole") as store,
        RolloutServer(store, TOKEN, ServerSettings(port=0)) as server,
        AsyncClient(server.url, TOKEN) as client,
    ):
        await client.submit(idle_task(samples=2))
        small, large = (await client.lease("n", LeaseRequest(max_sessions=2, runtimes=("idle",)))).leases
        # More than one piece, as a large recording goes.
        data = b"0123456789" * 2_000_000
        deliveries = [
            Delivery(
                key=small.key,
                result=result_of(small, has_recording=True, has_artifacts=True),
                recording=b"tokens",
                artifacts=b"zip",
            ),
            Delivery(key=large.key, result=result_of(large, has_recording=True), recording=data),
        ]
        assert await client.deliver("n", deliveries) == [None, None]
        assert not list(tmp_path.glob(".part-*"))
        assert await client.recording(small.session_id) == b"tokens"
        assert await client.artifacts(small.session_id) == b"zip"
        assert await client.recording(large.session_id) == data
        assert not (tmp_path / "recordings").exists()
        assert await sweep(store, Retention(recordings=-1.0)) == Swept(recordings=2)
        with pytest.raises(NotFound, match="has no recordings"):
            await client.recording(small.session_id)
        assert await client.artifacts(small.session_id) == b"zip"


async def test_other_leases_are_cleared_away_by_name(tmp_path: Path, bucket: str) -> None:
    blobs = open_blobs("recordings", tmp_path, f"{bucket}/fenced")
    for token in (1, 2):
        await blobs.put(BlobName("s.0", token), b"%d" % token)
    await blobs.put(BlobName("s.1", 1), b"another's")
    await blobs.keep_only(BlobName("s.0", 2))
    found = await blobs.found()
    assert found.keys() == {BlobName("s.0", 2), BlobName("s.1", 1)}
    assert None not in found.values()


async def test_store_that_is_away_is_said_in_one_line(tmp_path: Path, bucket: str) -> None:
    blobs = open_blobs("recordings", tmp_path, "s3://no-such-bucket/x")
    with pytest.raises(Unavailable, match="s3://no-such-bucket/x/recordings cannot be used") as caught:
        await blobs.put(BlobName("s.0", 1), b"data")
    assert "\n" not in str(caught.value)


async def test_the_server_answers(bucket: str) -> None:
    """The tests above talk to a real server, not to a memory of one."""
    import os

    async with httpx.AsyncClient(trust_env=False) as http:
        listing = await http.get(f"{os.environ['AWS_ENDPOINT_URL']}/polar?list-type=2")
    assert b"<ListBucketResult" in listing.content
