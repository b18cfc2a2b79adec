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
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from polar import __version__
from polar.config.settings import TelemetrySettings, environment_otlp_endpoint
from polar.errors import NotInstalled
from polar.models.completion import Completion
from polar.models.session import Lease, SessionResult, SessionStatus

if TYPE_CHECKING:
    from polar.telemetry.spans import Spans

log = logging.getLogger(__name__)

LAST_SPANS_SECONDS = 3.0

_spans: Spans | None = None
"""Where this process's spans go; None: nowhere."""


class SessionSpan:
    """One attempt at a session, while it runs; this one tells nobody."""

    @property
    def traceparent(self) -> str | None:
        """The stage that it is in, as W3C's header names it; spans of other processes may go below it."""
        return None

    def enter(self, stage: SessionStatus) -> None:
        """The session is in this stage from now on."""

    def end(self, result: SessionResult | None) -> None:
        """It is over; without a result, it was given up here. What has ended stays as it ended."""


def session(lease: Lease, *, node: str, model: str) -> SessionSpan:
    """A span for an attempt at a session, which is in INIT."""
    return SessionSpan() if _spans is None else _spans.session(lease, node=node, model=model)


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
async def exporting(settings: TelemetrySettings, resource: Mapping[str, str]) -> AsyncIterator[None]:
    """While the body runs, send the spans of this process where the settings or the environment say."""
    global _spans
    spans = _started(settings, resource)
    if spans is None:
        yield
        return
    _spans, before = spans, _spans
    try:
        yield
    finally:
        _spans = before
        # A collector that is down must not hold the process: the thread ends with it.
        closing = threading.Thread(target=spans.close, name="polar-last-spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, LAST_SPANS_SECONDS)
        if closing.is_alive():
            log.warning("the last spans could not be sent within %g s", LAST_SPANS_SECONDS)


def _started(settings: TelemetrySettings, resource: Mapping[str, str]) -> Spans | None:
    """What makes spans; None: nobody has said where they go."""
    endpoint = settings.traces
    if endpoint == "off" or not (endpoint or environment_otlp_endpoint()):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if endpoint is not None:
            raise NotInstalled("traces need OpenTelemetry", hint="pip install 'polar-rl[otel]'") from None
        # The variable is every program's; whoever set it need not have thought of this one.
        log.warning("no traces: OTEL_EXPORTER_OTLP_ENDPOINT is set, but polar-rl[otel] is not installed")
        return None
    from polar.telemetry.spans import Spans

    # Without an address the exporter reads one from the environment.
    if endpoint is not None and not endpoint.endswith("/v1/traces"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
    about = {"service.name": "polar", "service.version": __version__, **resource}
    return Spans(processor, about, with_content=settings.trace_content)
