"""What running sessions have captured: taken from the node that holds them, given to the one that goes on."""

from __future__ import annotations

import httpx
import pytest

from polar.config.settings import ServerSettings
from polar.models.access import NewToken, TokenRole
from polar.models.delivery import MOST_DELIVERIES, SIZES, CaptureGrowth
from polar.models.session import LeaseKey
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from tests.fakes.control_plane import body_of, idle_task
from tests.waiting import succeeds

TOKEN = "a token for tests only"


async def leased(http: httpx.AsyncClient) -> LeaseKey:
    await http.post("/tasks", json=idle_task("t").model_dump(mode="json"))
    return await again(http)


async def again(http: httpx.AsyncClient) -> LeaseKey:
    request = {"max_sessions": 1, "runtimes": ["idle"]}
    (lease,) = (await http.post("/nodes/n/lease", json=request)).json()["leases"]
    return LeaseKey.model_validate(lease["key"])


def growth(key: LeaseKey, data: bytes, offset: int = 0) -> CaptureGrowth:
    return CaptureGrowth(session_id="t.0", key=key, offset=offset, data=data)


async def ship(http: httpx.AsyncClient, *grown: CaptureGrowth) -> httpx.Response:
    return await http.post("/nodes/n/captures", content=body_of(*grown))


async def capture(http: httpx.AsyncClient, key: LeaseKey) -> httpx.Response:
    return await http.post("/sessions/t.0/capture", json=key.model_dump())


async def test_what_one_node_captured_is_given_to_the_next(http: httpx.AsyncClient) -> None:
    first = await leased(http)
    answer = await ship(http, growth(first, b"ab"), growth(first, b"c", offset=2))
    assert (answer.status_code, answer.json()) == (200, {"lengths": [2, 3]})
    await http.post("/sessions/t.0/release", json={"key": first.model_dump()})
    second = await again(http)
    answer = await capture(http, second)
    assert (answer.status_code, answer.content) == (200, b"abc")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (await ship(http, growth(first, b"late", offset=3))).json() == {"lengths": [None]}


async def test_only_the_lease_that_holds_a_session_opens_its_capture(
    http: httpx.AsyncClient, store: Store
) -> None:
    key = await leased(http)
    await ship(http, growth(key, b"private"))
    made = await store.tokens.create(NewToken(name="north", role=TokenRole.NODE))
    node = {"Authorization": f"Bearer {made.token}"}
    for other in (key.model_copy(update={"secret": "guessed"}), key.model_copy(update={"fencing_token": 2})):
        answer = await http.post("/sessions/t.0/capture", json=other.model_dump(), headers=node)
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await http.post("/sessions/none.0/capture", json=key.model_dump())).status_code == 409
    assert (
        await http.post("/sessions/t.0/capture", json=key.model_dump(), headers=node)
    ).content == b"private"


async def test_a_session_without_a_capture_has_an_empty_one(http: httpx.AsyncClient) -> None:
    assert (await capture(http, await leased(http))).content == b""


async def test_a_body_that_is_not_what_its_sizes_say_changes_nothing(http: httpx.AsyncClient) -> None:
    key = await leased(http)
    whole = body_of(growth(key, b"data"))
    for broken in (
        whole[:-1],
        whole[:10],
        whole + b"more",
        SIZES.pack(1 << 60, 0, 0),
        SIZES.pack(2, 0, 0) + b"{}",
    ):
        answer = await http.post("/nodes/n/captures", content=broken)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_input")
    answer = await http.post("/nodes/n/captures", content=body_of(growth(key, b"x" * (5 << 20))))
    assert answer.status_code == 413
    answer = await ship(http, *[growth(key, b"")] * (MOST_DELIVERIES + 1))
    assert "more than 256 captures" in answer.json()["error"]
    assert (await capture(http, key)).content == b""


@pytest.mark.parametrize("most", [0, 3])
async def test_the_server_says_how_much_it_keeps_and_takes_no_more(store: Store, most: int) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        RolloutServer(store, TOKEN, ServerSettings(port=0, resume_bytes=most)) as server,
        httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers=headers, trust_env=False) as http,
    ):
        joined = await http.post("/nodes/n/join", json={"version": "0"})
        assert joined.json()["resume_bytes"] == most
        key = await leased(http)
        assert (await ship(http, growth(key, b"long"))).json() == {"lengths": [None]}
        assert (await capture(http, key)).content == b""


async def test_of_all_sessions_together_no_more_is_kept_than_the_server_may(store: Store) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        RolloutServer(store, TOKEN, ServerSettings(port=0, resume_total_bytes=5)) as server,
        httpx.AsyncClient(base_url=f"{server.url}/api/v1", headers=headers, trust_env=False) as http,
    ):
        key = await leased(http)
        assert (await ship(http, growth(key, b"abc"), growth(key, b"def", 3))).json() == {"lengths": [3, 6]}
        assert (await ship(http, growth(key, b"g", 6))).json() == {"lengths": [None]}
        assert (await capture(http, key)).content == b"abcdef"
        assert await store.captures.size() == 6
    async with RolloutServer(store, TOKEN, ServerSettings(port=0, resume_total_bytes=5)) as again:
        page = f"{again.url}/metrics"
        async with httpx.AsyncClient(headers=headers, trust_env=False) as http:
            await succeeds(lambda: _counts(http, page, "polar_server_captured_bytes 6.0"), AssertionError)


async def _counts(http: httpx.AsyncClient, page: str, line: str) -> None:
    assert line in (await http.get(page)).text
