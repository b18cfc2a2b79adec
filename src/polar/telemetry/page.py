"""The metrics page in Prometheus' text format: what it collects, who may read it, where it is served."""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import ProcessCollector, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from polar.config.settings import TelemetrySettings
from polar.errors import PolarError

log = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_LATEST
PATH = "/metrics"

# Creation times of counters would double the page, and nobody reads them.
disable_created_metrics()  # type: ignore[no-untyped-call]

MetricSource = Callable[[], Awaitable[Iterable[Metric]]]
"""Collects the metric families of one part of the process."""


class MetricsPage:
    """The one metrics page of a process; parts add themselves as they start and share no families."""

    def __init__(self) -> None:
        self._process = ProcessCollector(registry=None)
        self._parts: list[MetricSource] = []

    def add(self, *parts: MetricSource) -> None:
        self._parts.extend(parts)

    @contextmanager
    def showing(self, *parts: MetricSource) -> Iterator[None]:
        self.add(*parts)
        try:
            yield
        finally:
            self._parts = [part for part in self._parts if part not in parts]

    async def text(self) -> bytes:
        families = list(self._process.collect())
        for part in tuple(self._parts):
            try:
                families += await part()
            except PolarError as error:
                # The rest of the page is most useful when something is wrong.
                log.warning("some metrics are missing from the page: %s", error)
        return generate_latest(_Collected(families))


@dataclass
class _Collected(Collector):
    """Wraps families that have already been collected as the collector that the formatter expects."""

    families: list[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")
"""Headers added by proxies, whose own address says nothing about the reader."""


def is_local(address: str | None, headers: Mapping[str, str]) -> bool:
    """Whether a request comes directly from this machine: not through a proxy, and with a local host name."""
    if address is None or any(name in headers for name in _FORWARDED):
        return False
    if not is_known_host(headers.get("host")):
        return False
    try:
        peer = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(peer, "ipv4_mapped", None)
    return (mapped or peer).is_loopback


def is_known_host(header: str | None, names: Collection[str] = ()) -> bool:
    """Whether a Host header is an address, localhost or one of `names`; browsers always send one."""
    if header is None:
        return True
    try:
        host = urlsplit(f"//{header}").hostname or ""
        if host == "localhost" or host.endswith(".localhost") or host in names:
            return True
        ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def bears(authorization: str | None, token: str | None) -> bool:
    """Whether a request carries the token; False if there is no token."""
    scheme, _, given = (authorization or "").partition(" ")
    if token is None or scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(), token.encode())


_REFUSED = "To read this page from another machine, send telemetry.metrics_token as a bearer token.\n"


@asynccontextmanager
async def listening(settings: TelemetrySettings, page: MetricsPage) -> AsyncIterator[str | None]:
    """Serve the page during the block and yield its URL; None if no port is configured."""
    if settings.metrics_port is None:
        yield None
        return

    async def show(request: web.Request) -> web.Response:
        authorization = request.headers.get("authorization")
        if not (is_local(request.remote, request.headers) or bears(authorization, settings.metrics_token)):
            return web.Response(status=401, text=_REFUSED, headers={"WWW-Authenticate": "Bearer"})
        return web.Response(body=await page.text(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.router.add_get(PATH, show)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    host, port = settings.metrics_host, settings.metrics_port
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise PolarError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}",
                hint="set telemetry.metrics_port to another port, or to 0 for a free one",
            ) from None
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{runner.addresses[0][1]}{PATH}"
    finally:
        await runner.cleanup()
