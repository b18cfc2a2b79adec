"""Webhooks: results are sent where their tasks want them, signed, until they are taken, to listed hosts only.

Each target follows the feed of results with a cursor of its own. A receiver that fails is asked again after
a growing pause, and what comes after waits for it; other targets do not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

import httpx
from prometheus_client import Counter

from polar import __version__, webhooks
from polar.config.settings import WebhookSettings
from polar.errors import Backoff, InvalidInput, PolarError
from polar.models.task import TaskSpec, WebhookEvent
from polar.models.views import Notice
from polar.rollout.long_poll import POLL_SECONDS, Notifier
from polar.runtimes.allow_list import AllowList, Destination
from polar.store.webhooks import Target, Webhooks

log = logging.getLogger(__name__)

MAX_TARGETS = 16
"""How many targets one server delivers to at once."""

MAX_AT_ONCE = 16
"""How many notices one target gets at once."""

BATCH = 4 * MAX_AT_ONCE

PAUSE_SECONDS = 0.1
"""Before a look at the feed, so that results that come in a row are sent together."""

MAX_BACKOFF_SECONDS = 300.0


def check_webhook(task: TaskSpec, allow: AllowList) -> None:
    """InvalidInput unless the host that a task wants its results sent to is listed."""
    if task.webhook is None:
        return
    try:
        wanted = destination(task.webhook.url)
    except ValueError as error:
        raise InvalidInput(f"webhook.url: {error}") from None
    if not allow.names(wanted):
        raise InvalidInput(
            f"webhook.url: {wanted} is not among the hosts that this server may call",
            hint="its administrator lists them in server.webhooks.allow",
        )


def destination(url: str) -> Destination:
    """The host and port of a URL; ValueError if the host is written in a way that could hide another."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Destination.parse(str(Destination(parts.hostname or "", port)))


@contextmanager
def tried_again(purpose: str) -> Iterator[None]:
    """What fails inside is logged: the server goes on, and does the same again later."""
    try:
        yield
    except PolarError as error:
        log.error("could not %s, will try again: %s", purpose, error)
    except Exception:
        log.exception("could not %s, will try again", purpose)


class WebhookSender:
    """Follows the feed of results and sends each target its own; several servers share the targets."""

    def __init__(
        self, store: Webhooks, settings: WebhookSettings, secret: str, ended: Notifier, attempts: Counter
    ) -> None:
        """`ended` tells of new results; `attempts` are counted by their outcome: delivered, failed."""
        self._store = store
        self._settings = settings
        self._secret = secret
        self._ended = ended
        self._attempts = attempts
        self._allow = AllowList.parse(settings.allow)
        self._backoff = Backoff(settings.retry_seconds, MAX_BACKOFF_SECONDS)
        self._tls = (
            ssl.create_default_context(cafile=str(settings.ca)) if settings.ca else httpx.create_ssl_context()
        )
        # Long enough for a batch where each result brings a notice of every event, the first sent alone:
        # whoever claims after that finds this server dead.
        rounds = len(WebhookEvent) * BATCH / MAX_AT_ONCE + 2
        self._claim_seconds = rounds * settings.timeout_seconds + 30
        self._under_way: set[Target] = set()
        """Claimed, and not settled as far as this server knows."""
        self._is_done = asyncio.Event()
        """Set when a target has got its batch: there may be more for it."""

    async def run(self) -> None:
        """Deliver for ever; what is under way when this is cancelled is sent again by the next server."""
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    ended = self._ended.listen()
                    with tried_again("look for webhooks"):
                        await self._begin(group)
                    await self._news(ended)
        finally:
            # The next server need not wait until the claims expire.
            for target in self._under_way:
                with suppress(PolarError):
                    await self._store.release(target)

    async def _news(self, ended: asyncio.Event) -> None:
        """Return when there may be something to send; a look takes time of the database, idle or not."""
        waiting = [asyncio.create_task(event.wait()) for event in (ended, self._is_done)]
        try:
            await asyncio.wait(waiting, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        if not self._is_done.is_set():
            await asyncio.sleep(PAUSE_SECONDS)
        self._is_done.clear()

    async def _begin(self, group: asyncio.TaskGroup) -> None:
        """Claim the targets that are due, as many as there is room for, and deliver to each."""
        while len(self._under_way) < MAX_TARGETS:
            target = await self._claim()
            if target is None:
                return
            group.create_task(self._serve(target), name=f"webhook {target.id}")

    async def _claim(self) -> Target | None:
        claiming = asyncio.ensure_future(self._store.claim(seconds=self._claim_seconds))
        try:
            await asyncio.shield(claiming)
        finally:
            # Whoever is cancelled here may have claimed it all the same.
            await asyncio.wait({claiming})
            if claiming.exception() is None and (target := claiming.result()) is not None:
                self._under_way.add(target)
        return claiming.result()

    async def _serve(self, target: Target) -> None:
        with tried_again(f"deliver to webhook {target.id}"):
            await self._deliver(target)
        self._under_way.discard(target)
        self._is_done.set()

    async def _deliver(self, target: Target) -> None:
        """Send one batch, and note how far that went."""
        batch = await self._store.read(target, limit=BATCH)
        delivered, error = await self._send(target, batch.notices)
        if error is None:
            await self._store.settle(target, batch.cursor)
            return
        cursor = max(batch.notices[delivered][0] - 1, target.cursor)
        failures = 1 if cursor > target.cursor else target.failures + 1
        later = self._backoff.pause(failures)
        log.warning(
            "webhook to %s, attempt %d: %s; again in %.0f s",
            *(destination(target.url), failures, error, later),
        )
        await self._store.settle(target, cursor, failures=failures, error=error, retry_seconds=later)

    async def _send(self, target: Target, notices: Sequence[tuple[int, Notice]]) -> tuple[int, str | None]:
        """How many notices were taken before the first that failed, and why it failed."""
        if not notices:
            return 0, None
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                url, host = await self._pinned(target.url)
        except (InvalidInput, OSError, ValueError) as error:
            return 0, _words(error)
        done = 0
        # For one target only: a connection that was made to one name must not carry what is for another.
        async with httpx.AsyncClient(
            verify=self._tls,
            trust_env=False,
            follow_redirects=False,
            timeout=self._settings.timeout_seconds,
            headers={"User-Agent": f"polar/{__version__}", "Content-Type": "application/json", "Host": host},
        ) as http:
            name = urlsplit(target.url).hostname
            while done < len(notices):
                # A target that failed is first sent a single notice.
                count = 1 if target.failures and not done else MAX_AT_ONCE
                some = [self._post(http, url, name, notice) for _, notice in notices[done : done + count]]
                for failure in await asyncio.gather(*some):
                    if failure is not None:
                        return done, failure
                    done += 1
        return done, None

    async def _post(self, http: httpx.AsyncClient, url: str, name: str | None, notice: Notice) -> str | None:
        """What went wrong, or None."""
        body = notice.model_dump_json().encode()
        headers = {
            webhooks.SIGNATURE: webhooks.sign(self._secret, body, time.time()),
            webhooks.DELIVERY: notice.id,
        }
        request = http.build_request(
            "POST", url, content=body, headers=headers, extensions={"sni_hostname": name}
        )
        error: str | None = None
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                answer = await http.send(request, stream=True)
                await answer.aclose()
            error = None if answer.is_success else f"it answered {answer.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as failure:
            error = _words(failure)
        self._attempts.labels("delivered" if error is None else "failed").inc()
        return error

    async def _pinned(self, url: str) -> tuple[str, str]:
        """The URL at an address that may be called, and the host it names.

        The name is resolved once and that address is used: another answer to a second question could
        lead elsewhere.
        """
        wanted = destination(url)
        if not self._allow.names(wanted):
            raise InvalidInput(f"{wanted} is not in server.webhooks.allow")
        found = await asyncio.get_running_loop().getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM
        )
        for *_, place in found:
            address = Destination(str(place[0]), wanted.port).address
            if address is not None and self._allow.admits(wanted, address):
                parts = urlsplit(url)
                at = Destination(str(address), wanted.port)
                return urlunsplit((parts.scheme, str(at), parts.path or "/", parts.query, "")), parts.netloc
        raise InvalidInput(
            f"{wanted.host} has no address that may be called",
            hint="one that is not public must itself be in server.webhooks.allow",
        )


def _words(error: Exception) -> str:
    if isinstance(error, PolarError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
