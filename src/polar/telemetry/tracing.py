"""Traces: session → stage → completion as OpenTelemetry spans, off until a process is told where they go.

As with logging, where spans go is a fact of the process: `exporting` sets it, and whoever has something to
tell begins a span here, which is nothing at all while there is no such place. Names follow the semantic
conventions for generative AI; what they have no name for is `polar.…`. No text of a conversation leaves
unless it was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from polar import __version__
from polar.config.settings import TelemetrySettings, environment_otlp_endpoint
from polar.errors import NotInstalled
from polar.models.completion import Completion
from polar.models.session import Lease, SessionResult, SessionStatus

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from polar.telemetry.spans import Spans

log = logging.getLogger(__name__)

LAST_SPANS_SECONDS = 3.0

_spans: Spans | None = None
"""Where this process's spans go; None: nowhere."""


class SessionSpan(Protocol):
    """One attempt at a session, while it runs."""

    @property
    def traceparent(self) -> str | None:
        """The stage that it is in, as W3C's header names it; spans of other processes may go below it."""

    def enter(self, stage: SessionStatus) -> None:
        """The session is in this stage from now on."""

    def end(self, result: SessionResult | None) -> None:
        """It is over; without a result, it was given up here. What has ended stays as it ended."""


class _NoSpan:
    traceparent = None

    def enter(self, stage: SessionStatus) -> None:
        return

    def end(self, result: SessionResult | None) -> None:
        return


_NO_SPAN = _NoSpan()


def session(lease: Lease, *, node: str, model: str) -> SessionSpan:
    """A span for an attempt at a session, which is in INIT."""
    return _NO_SPAN if _spans is None else _spans.session(lease, node=node, model=model)


def completion(done: Completion, *, session_id: str, model: str, parent: str | None) -> None:
    """A span for a completion that has just been recorded; `parent` is a stage's `traceparent`."""
    if _spans is None:
        return
    try:
        _spans.completion(done, session_id=session_id, model=model, parent=parent)
    except Exception:
        # A call is not to fail because somebody watches it.
        log.exception("session %s: a completion has no span", session_id)


@asynccontextmanager
async def exporting(
    settings: TelemetrySettings, resource: Mapping[str, str], *, to: SpanProcessor | None = None
) -> AsyncIterator[None]:
    """Send this process's spans where the settings or the environment say, if they do, while the body runs.

    `to` takes the place of the exporter that they name.
    """
    global _spans
    if to is None and not _is_wanted(settings):
        yield
        return
    spans = _started(settings, resource, to)
    _spans, before = spans, _spans
    try:
        yield
    finally:
        _spans = before
        await _closed(spans)


async def _closed(spans: Spans) -> None:
    """Send what is left, for a while: a collector that is down must not hold the process."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()

    def close() -> None:
        spans.close()
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            loop.call_soon_threadsafe(sent.set)

    threading.Thread(target=close, name="polar-last-spans", daemon=True).start()
    try:
        async with asyncio.timeout(LAST_SPANS_SECONDS):
            await sent.wait()
    except TimeoutError:
        log.warning("the last spans could not be sent within %g s", LAST_SPANS_SECONDS)


def _is_wanted(settings: TelemetrySettings) -> bool:
    if settings.traces is not None:
        return settings.traces != "off"
    if environment_otlp_endpoint() is None:
        return False
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        # The variable is every program's; whoever set it need not have thought of this one.
        log.warning("no traces: OTEL_EXPORTER_OTLP_ENDPOINT is set, but polar-rl[otel] is not installed")
        return False
    return True


def _started(
    settings: TelemetrySettings, resource: Mapping[str, str], processor: SpanProcessor | None
) -> Spans:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise NotInstalled("traces need OpenTelemetry", hint="pip install 'polar-rl[otel]'") from None
    from polar.telemetry.spans import Spans

    if processor is None:
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=_endpoint(settings.traces)))
    about = {"service.name": "polar", "service.version": __version__, **resource}
    return Spans(processor, about, with_content=settings.trace_content)


def _endpoint(url: str | None) -> str | None:
    """The address that takes traces; None: the exporter reads it from the environment."""
    if url is None or url.endswith("/v1/traces"):
        return url
    return f"{url.rstrip('/')}/v1/traces"
