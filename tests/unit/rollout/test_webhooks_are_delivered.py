"""Webhooks from a live server to a live receiver: signed, again until taken, and only where they may go."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from polar.config.settings import ServerSettings, WebhookSettings
from polar.errors import InvalidInput
from polar.models.delivery import Delivery
from polar.models.task import Webhook, WebhookEvent
from polar.models.views import WebhookView
from polar.rollout import webhooks as sender
from polar.rollout.server import RolloutServer
from polar.store.store import Store
from polar.store.webhooks import Target, Webhooks
from polar.webhooks import DELIVERY
from tests.databases import fresh_postgres
from tests.fakes.control_plane import body_of, idle_task, result_of
from tests.fakes.webhook_receiver import Receiver, receiving
from tests.waiting import eventually

TOKEN = "a token for tests only"
SECRET = "shared between two"


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving(SECRET) as made:
        yield made


def settings(*allow: str, **changes: object) -> ServerSettings:
    quick = {"retry_seconds": 0.01, "secret": SECRET, "allow": allow, **changes}
    return ServerSettings(port=0, webhooks=WebhookSettings.model_validate(quick))


def host(receiver: Receiver) -> str:
    return receiver.url.removeprefix("http://").removesuffix("/hook")


@asynccontextmanager
async def serving(store: Store, *allow: str, **changes: object) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        RolloutServer(store, TOKEN, settings(*allow, **changes)) as server,
        httpx.AsyncClient(
            base_url=f"{server.url}/api/v1", headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
        ) as http,
    ):
        yield http


async def complete(http: httpx.AsyncClient, store: Store, id: str, url: str, samples: int = 1) -> None:
    """A task with a webhook, submitted and rolled out."""
    task = idle_task(id, samples=samples, webhook=Webhook(url=url))
    answer = await http.post("/tasks", json=task.model_dump(mode="json"))
    assert answer.status_code == 201, answer.text
    for lease in await store.leases.claim("north", limit=samples, runtimes=["idle"], seconds=60):
        body = body_of(Delivery(key=lease.key, result=result_of(lease)))
        assert (await http.post("/nodes/north/deliveries", content=body)).json() == {"problems": [None]}


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    """What the server's page says of webhooks."""
    page = await http.get(http.base_url.copy_with(path="/metrics"))
    return {
        "_".join([sample.name.removeprefix("polar_server_"), *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(page.text)
        if family.name.startswith("polar_server_webhook")
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


async def until(store: Store, is_so: Callable[[WebhookView], bool]) -> WebhookView:
    """The one webhook, once it is so."""

    async def seen() -> WebhookView | None:
        (view,) = await store.webhooks.all()
        return view if is_so(view) else None

    return await eventually(seen)


async def test_the_receiver_gets_a_result_that_it_can_verify(store: Store, receiver: Receiver) -> None:
    async with serving(store, host(receiver)) as http:
        await complete(http, store, "t", receiver.url)
        (notice,) = await receiver.until_handled(1)
        await until(store, lambda view: view.lag == 0)
        (view,) = (await http.get("/webhooks")).json()["webhooks"]
    assert notice.result is not None
    assert notice.result.session_id == notice.session_id == "t.0"
    headers, _ = receiver.requests[0]
    assert headers[DELIVERY] == notice.id
    assert headers["Host"] == host(receiver)
    assert "Authorization" not in headers
    assert (view["url"], view["lag"], view["error"]) == (receiver.url, 0, None)


async def test_a_receiver_that_fails_is_asked_again_until_it_takes_it(
    store: Store, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.failing = 2
    async with serving(store, host(receiver)) as http:
        await complete(http, store, "t", receiver.url)
        await receiver.until_handled(1)
        await until(store, lambda view: view.lag == 0)
        assert (await metrics(http))["webhook_attempts_total_failed"] == 2
    assert len({body for _, body in receiver.requests}) == 1
    assert len(receiver.notices) == 1
    assert f"webhook to {host(receiver)}, attempt 2: it answered 500; again in" in caplog.text


async def test_what_comes_after_a_failure_waits_for_it_and_nothing_is_lost(
    store: Store, receiver: Receiver
) -> None:
    receiver.failing = 8
    async with serving(store, host(receiver)) as http:
        await complete(http, store, "t", receiver.url, samples=70)
        notices = await receiver.until_handled(70)
        await until(store, lambda view: view.lag == 0)
    assert len({notice.session_id for notice in notices}) == len(notices) == 70


async def test_lag_and_the_last_error_are_shown(store: Store, receiver: Receiver) -> None:
    receiver.failing = 1_000
    async with serving(store, host(receiver), retry_seconds=300) as http:
        await complete(http, store, "t", receiver.url, samples=2)
        view = await until(store, lambda view: view.error is not None)
        assert (view.error, view.failures, view.lag) == ("it answered 500", 1, 2)
        shown = await metrics(http)
        assert (shown["webhook_lag"], shown["webhooks_failing"]) == (2, 1)
        assert shown["webhook_lag_seconds"] > 0


async def test_what_waits_when_the_server_ends_is_delivered_by_the_next(
    store: Store, receiver: Receiver
) -> None:
    receiver.failing = 1
    async with serving(store, host(receiver)) as http:
        await complete(http, store, "t", receiver.url)
        await until(store, lambda view: view.error is not None)
    async with serving(store, host(receiver)):
        assert [notice.session_id for notice in await receiver.until_handled(1)] == ["t.0"]


async def test_what_is_under_way_when_the_server_ends_is_sent_at_once_by_the_next(
    store: Store, receiver: Receiver
) -> None:
    receiver.hanging = answer = asyncio.Event()
    async with serving(store, host(receiver)) as http:
        await complete(http, store, "t", receiver.url)
        await receiver.until_asked(1)
    receiver.hanging = None
    async with serving(store, host(receiver)):
        assert [notice.session_id for notice in await receiver.until_handled(1)] == ["t.0"]
    answer.set()


async def test_what_is_claimed_when_the_server_ends_is_sent_at_once_by_the_next(
    store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, is_claimed = Webhooks.claim, asyncio.Event()

    async def slow(self: Webhooks, *, seconds: float) -> Target | None:
        target = await claim(self, seconds=seconds)
        if target is not None:
            is_claimed.set()
            # The server has begun to end.
            await eventually(lambda: any(task.cancelling() for task in asyncio.all_tasks()))
        return target

    with monkeypatch.context() as patched:
        patched.setattr(Webhooks, "claim", slow)
        async with serving(store, host(receiver)) as http:
            await complete(http, store, "t", receiver.url)
            await is_claimed.wait()
    assert not receiver.notices
    async with serving(store, host(receiver)), asyncio.timeout(10):
        await receiver.until_handled(1)


async def test_two_servers_on_one_database_deliver_each_once(
    tmp_path: Path, receiver: Receiver, store: Store
) -> None:
    url = fresh_postgres()
    async with AsyncExitStack() as parts:
        stores = [
            await parts.enter_async_context(Store.open(tmp_path / name, database_url=url)) for name in "ab"
        ]
        http, _ = [await parts.enter_async_context(serving(opened, host(receiver))) for opened in stores]
        await complete(http, stores[0], "t", receiver.url, samples=40)
        await receiver.until_handled(40)
        await until(stores[1], lambda view: view.lag == 0)
    assert len(receiver.requests) == 40
    assert receiver.replays == 0


async def test_a_claim_lasts_for_the_slowest_batch(
    store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: list[float] = []
    claim = Webhooks.claim

    async def noted(self: Webhooks, *, seconds: float) -> Target | None:
        claims.append(seconds)
        return await claim(self, seconds=seconds)

    monkeypatch.setattr(Webhooks, "claim", noted)
    async with serving(store, host(receiver), timeout_seconds=100) as http:
        await complete(http, store, "t", receiver.url)
        await receiver.until_handled(1)
    # Each result of a batch can end its task too, and a target that failed is first sent a single notice.
    assert claims[0] > 100 * (1 + sender.BATCH * len(WebhookEvent) / sender.MAX_AT_ONCE)


async def test_a_server_with_nothing_to_send_leaves_the_database_in_peace(
    store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    claim = Webhooks.claim

    async def counted(self: Webhooks, *, seconds: float) -> Target | None:
        nonlocal looks
        looks += 1
        return await claim(self, seconds=seconds)

    monkeypatch.setattr(Webhooks, "claim", counted)
    monkeypatch.setattr(sender, "POLL_SECONDS", 60.0)
    async with serving(store, host(receiver)) as http, asyncio.timeout(30):
        # A result is sent when it is stored, not at the next look.
        await complete(http, store, "t", receiver.url)
        await receiver.until_handled(1)
    assert looks <= 6, "at the start, and twice each: for the task, its result, and what may follow it"


async def test_targets_take_turns(store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_TARGETS", 1)
    monkeypatch.setattr(sender, "BATCH", 1)
    async with serving(store, host(receiver)) as http:
        await complete(http, store, "busy", f"{receiver.url}?busy", samples=40)
        await complete(http, store, "quiet", f"{receiver.url}?quiet")
        notices = await receiver.until_handled(41)
    assert notices[-1].task_id == "busy"


async def test_a_slow_receiver_holds_up_no_other(store: Store, receiver: Receiver) -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    place = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with silent, serving(store, host(receiver), place, timeout_seconds=20) as http:
        await complete(http, store, "slow", f"http://{place}/hook")
        await complete(http, store, "quick", receiver.url)
        async with asyncio.timeout(10):
            await receiver.until_handled(1)


NOT_LISTED = (
    "http://127.0.0.1:9/hook",
    "http://localhost:9/hook",
    "http://169.254.169.254/latest/meta-data",
    "http://[::1]:9/",
    "https://hooks.example:8443/",
    "https://evil.example/",
    "https://hooks.example.evil.example/",
    "http://0x7f000001/",
)
HIDING = ("ftp://hooks.example/", "https://me:secret@hooks.example/", "https:///x", "https://h/#x", "h")


async def test_hosts_that_are_not_listed_are_refused_at_once(store: Store) -> None:
    async with serving(store, "hooks.example:443", "*.corp.example:443") as http:
        for url in (*NOT_LISTED, *HIDING):
            task = idle_task("t").model_dump(mode="json") | {"webhook": {"url": url}}
            for path, body in (("/tasks", task), ("/tasks/batch", {"tasks": [task]})):
                answer = await http.post(path, json=body)
                assert answer.status_code == 400, url
                assert "webhook.url" in answer.json()["error"]
                assert "secret" not in answer.text
        assert (await http.get("/tasks")).json()["tasks"] == []


async def test_a_listed_name_that_leads_inside_is_not_called(
    store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(host(receiver).rpartition(":")[2])

    async def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", ("127.0.0.1", port)), (10, 1, 6, "", ("::ffff:127.0.0.1", port, 0, 0))]

    async with serving(store, f"hooks.example:{port}") as http:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
        await complete(http, store, "t", f"http://hooks.example:{port}/hook")
        view = await until(store, lambda view: view.error is not None)
    assert "hooks.example has no address that may be called" in (view.error or "")
    assert receiver.requests == []


@pytest.mark.parametrize(
    ("address", "said"), [(None, "TimeoutError"), ("fe80::1%eth0", "has no address that may be called")]
)
async def test_a_name_that_cannot_be_resolved_is_told_and_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, address: str | None, said: str
) -> None:
    async def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        if address is None:
            await asyncio.Event().wait()
        return [(10, 1, 6, "", (address, 443, 0, 2))]

    async with serving(store, "hooks.example:443", timeout_seconds=0.1) as http:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve, raising=False)
        await complete(http, store, "t", "https://hooks.example/hook")
        async with asyncio.timeout(10):
            view = await until(store, lambda view: view.failures > 1)
    assert said in (view.error or "")


async def test_redirects_are_not_followed(store: Store, receiver: Receiver) -> None:
    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 307 Go\r\nLocation: {receiver.url}\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(elsewhere, "127.0.0.1", 0)
    place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, serving(store, place) as http:
        await complete(http, store, "t", f"http://{place}/hook")
        assert (await until(store, lambda view: view.error is not None)).error == "it answered 307"
    assert receiver.requests == []


@pytest.mark.parametrize(("name", "is_delivered"), [("localhost", True), ("other.example", False)])
async def test_a_receiver_over_tls_must_be_the_one_that_is_named(
    store: Store, tmp_path: Path, name: str, is_delivered: bool
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(name).configure_cert(context)
    async with receiving(SECRET, context) as receiver:
        place = receiver.url.removeprefix("https://").removesuffix("/hook")
        async with serving(store, place, ca=tmp_path / "ca.pem") as http:
            await complete(http, store, "t", receiver.url)
            await until(store, lambda view: view.lag == 0 if is_delivered else view.error is not None)
    assert len(receiver.notices) == is_delivered


async def test_without_a_secret_a_server_that_may_call_does_not_start(store: Store) -> None:
    with pytest.raises(InvalidInput, match="no secret to sign webhooks with"):
        async with RolloutServer(store, TOKEN, settings("hooks.example:443", secret=None)):
            pass
