"""Traces: session → stage → completion as OpenTelemetry spans, off until a process exports them.

As with logging, the destination belongs to the process: `exporting` sets it, and spans begun here cost
nothing while there is none. Names follow the semantic conventions for generative AI, with `polar.…` for the
rest. The text of conversations is left out unless it is asked for.
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


class SessionSpan:
    """One attempt at a session while it runs; this base class records nothing."""

    @property
    def traceparent(self) -> str | None:
        """The current stage as a W3C traceparent header, for spans of other processes below it."""
        return None

    def enter(self, stage: SessionStatus) -> None:
        """Begin the span of this stage."""

    def end(self, result: SessionResult | None) -> None:
        """End the span; no result means the attempt was abandoned. A second call changes nothing."""


def session(lease: Lease, *, node: str, model: str) -> SessionSpan:
    """Begin the span of an attempt at a session, which is in INIT."""
    return SessionSpan() if _spans is None else _spans.session(lease, node=node, model=model)


def completion(done: Completion, *, session_id: str, model: str, parent: str | None) -> None:
    """Record the span of a completion; `parent` is a stage's `traceparent`."""
    if _spans is None:
        return
    try:
        _spans.completion(done, session_id=session_id, model=model, parent=parent)
    except Exception:
        # Tracing must never fail a call.
        log.exception("session %s: could not record the span of a completion", session_id)


@asynccontextmanager
async def exporting(settings: TelemetrySettings, resource: Mapping[str, str]) -> AsyncIterator[None]:
    """Export this process's spans during the block, as the settings or the environment say."""
    global _spans
    spans = _make_spans(settings, resource)
    if spans is None:
        yield
        return
    _spans, before = spans, _spans
    try:
        yield
    finally:
        _spans = before
        # A collector that is down must not delay the exit: the thread ends with the process.
        closing = threading.Thread(target=spans.close, name="polar-last-spans", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, LAST_SPANS_SECONDS)
        if closing.is_alive():
            log.warning("the last spans could not be sent within %g s", LAST_SPANS_SECONDS)


def _make_spans(settings: TelemetrySettings, resource: Mapping[str, str]) -> Spans | None:
    endpoint = settings.traces
    if endpoint == "off" or not (endpoint or environment_otlp_endpoint()):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        if endpoint is not None:
            raise NotInstalled("traces need OpenTelemetry", hint="pip install 'polar-rl[otel]'") from None
        # The variable is shared by all programs and may not have been meant for this one.
        log.warning(
            "no traces are sent: OTEL_EXPORTER_OTLP_ENDPOINT is set, but polar-rl[otel] is not installed"
        )
        return None
    from polar.telemetry.spans import Spans

    # Without an address the exporter reads one from the environment.
    if endpoint is not None and not endpoint.endswith("/v1/traces"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
    about = {"service.name": "polar", "service.version": __version__, **resource}
    return Spans(processor, about, with_content=settings.trace_content)
