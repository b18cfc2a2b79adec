"""Tells others what has ended: at least once, signed, again after failures, and only listed hosts."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from enum import StrEnum
from urllib.parse import urlsplit, urlunsplit

import httpx

from polar import __version__, callbacks
from polar.config.settings import CallbackSettings
from polar.errors import Backoff, InvalidInput, PolarError
from polar.models.task import TaskSpec
from polar.rollout.long_poll import Notifier
from polar.runtimes.allow_list import AllowList, Destination
from polar.store.callbacks import Callbacks, Claimed

log = logging.getLogger(__name__)

MOST_AT_ONCE = 16
LOOK_AGAIN_SECONDS = 1.0
"""How often what another server stored is looked for; our own results wake us."""

PAUSE_SECONDS = 0.1
"""Between looks at the feed, so that results that come in a row are handled together."""

LONGEST_BACKOFF_SECONDS = 600.0


def check_callback(task: TaskSpec, allow: AllowList) -> None:
    """InvalidInput unless the host that a task wants told is listed."""
    if task.callback is None:
        return
    try:
        wanted = destination(task.callback.url)
    except ValueError as error:
        raise InvalidInput(f"callback.url: {error}") from None
    if not allow.names(wanted):
        raise InvalidInput(
            f"callback.url: {wanted} is not among the hosts that this server may call",
            hint="its administrator lists them in server.callbacks.allow",
        )


def destination(url: str) -> Destination:
    """The host and port of a URL; ValueError if the host is written in a way that could hide another."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Destination.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def backoff(attempt: int, first: float) -> float:
    """Seconds to wait after this many attempts: exponential backoff with jitter."""
    return Backoff(first, LONGEST_BACKOFF_SECONDS).pause(attempt)


class Attempt(StrEnum):
    """How one attempt to tell somebody ended."""

    DELIVERED = "delivered"
    FAILED = "failed"
    """It is tried again."""
    GIVEN_UP = "given_up"
    """It was the last: the callback is dead."""


class WebhookSender:
    """Follows the feed of results and delivers what its tasks want told; several servers share the work."""

    def __init__(
        self,
        store: Callbacks,
        settings: CallbackSettings,
        secret: str,
        ended: Notifier,
        attempted: Callable[[Attempt], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._secret = secret
        self._ended = ended
        self._attempted = attempted
        self._allow = AllowList.parse(settings.allow)
        self._under_way: set[asyncio.Task[None]] = set()
        self._free = Notifier()

    async def run(self) -> None:
        """Deliver for ever; what is under way when this is cancelled is tried again after its claim."""
        verify = ssl.create_default_context(cafile=str(self._settings.ca)) if self._settings.ca else True
        async with (
            httpx.AsyncClient(
                verify=verify,
                trust_env=False,
                follow_redirects=False,
                # A connection is made to one name: it must not carry what is meant for another.
                limits=httpx.Limits(max_keepalive_connections=0),
                timeout=self._settings.timeout_seconds,
                headers={"User-Agent": f"polar/{__version__}", "Content-Type": "application/json"},
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            while True:
                rung, freed = self._ended.listen(), self._free.listen()
                try:
                    has_more = await self._look(http, group)
                except PolarError as error:
                    log.error("callbacks could not be looked for, will try again: %s", error)
                    has_more = False
                except Exception:
                    log.exception("callbacks could not be looked for, will try again")
                    has_more = False
                if not has_more:
                    await self._wait(rung, freed)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _look(self, http: httpx.AsyncClient, group: asyncio.TaskGroup) -> bool:
        """Make callbacks of what has ended, and begin those whose time has come; whether to look again."""
        found = await self._store.follow()
        room = MOST_AT_ONCE - len(self._under_way)
        if room <= 0:
            return False
        # Long enough for the attempt and its report: whoever claims after that finds this server dead.
        claimed = await self._store.claim(room, seconds=2 * self._settings.timeout_seconds + 30)
        for one in claimed:
            task = group.create_task(self._attempt(http, one), name=f"callback {one.id}")
            self._under_way.add(task)
            task.add_done_callback(self._done)
        return found or len(claimed) == room

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self._free.notify()

    async def _wait(self, *events: asyncio.Event) -> None:
        due = await self._next_due()
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(
                waits, timeout=min(due, LOOK_AGAIN_SECONDS), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for wait in waits:
                wait.cancel()

    async def _next_due(self) -> float:
        try:
            due = await self._store.next_due()
        except PolarError:
            return LOOK_AGAIN_SECONDS
        return LOOK_AGAIN_SECONDS if due is None else due

    async def _attempt(self, http: httpx.AsyncClient, claimed: Claimed) -> None:
        """One attempt and its report."""
        try:
            error = await self._deliver(http, claimed)
        except Exception:
            log.exception("callback %s failed", claimed.id)
            error = "the server failed on it; its log says why"
        try:
            if error is None:
                self._attempted(Attempt.DELIVERED)
                await self._store.delivered(claimed)
                return
            is_last = claimed.attempt >= self._settings.max_attempts
            self._attempted(Attempt.GIVEN_UP if is_last else Attempt.FAILED)
            later = None if is_last else backoff(claimed.attempt, self._settings.retry_seconds)
            (log.error if is_last else log.info)(
                "callback %s of task %s, attempt %d: %s%s",
                *(claimed.id, claimed.notice.task_id, claimed.attempt, error),
                "; given up" if is_last else "",
            )
            await self._store.failed(claimed, error, retry_seconds=later)
        except PolarError as trouble:
            log.error(
                "callback %s: its outcome could not be stored, it will come again: %s", claimed.id, trouble
            )

    async def _deliver(self, http: httpx.AsyncClient, claimed: Claimed) -> str | None:
        """What went wrong, or None."""
        body = claimed.notice.model_dump_json().encode()
        try:
            url, host = await self._pinned(claimed.url)
            request = http.build_request(
                "POST",
                url,
                content=body,
                headers={
                    "Host": host,
                    callbacks.SIGNATURE: callbacks.sign(self._secret, body, time.time()),
                    callbacks.DELIVERY: claimed.id,
                },
                extensions={"sni_hostname": urlsplit(claimed.url).hostname},
            )
            async with asyncio.timeout(self._settings.timeout_seconds):
                answer = await http.send(request, stream=True)
                await answer.aclose()
        except InvalidInput as error:
            return str(error)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return None if answer.is_success else f"it answered {answer.status_code}"

    async def _pinned(self, url: str) -> tuple[str, str]:
        """The URL at an address that may be called, and the host it names.

        The name is resolved once and that address is used: another answer to a second question could
        lead elsewhere.
        """
        try:
            wanted = destination(url)
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        if not self._allow.names(wanted):
            raise InvalidInput(f"{wanted} is not in server.callbacks.allow")
        found = await asyncio.get_running_loop().getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM
        )
        for *_, place in found:
            address = Destination.parse(
                f"[{place[0]}]:1" if ":" in str(place[0]) else f"{place[0]}:1"
            ).address
            if address is not None and self._allow.admits(wanted, address):
                parts = urlsplit(url)
                at = Destination(str(address), wanted.port)
                return urlunsplit((parts.scheme, str(at), parts.path or "/", parts.query, "")), parts.netloc
        raise InvalidInput(
            f"{wanted.host} has no address that may be called",
            hint="one that is not public must itself be in server.callbacks.allow",
        )
