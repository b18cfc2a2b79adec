"""A collector of traces that speaks OTLP over HTTP and keeps what came."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.listening import listening


@dataclass
class Collector:
    """An OTLP/HTTP receiver."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    raw: bytes = b""

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        message = ExportTraceServiceRequest()
        message.ParseFromString(body)
        self.requests.append(message)
        self.raw += body
        return web.Response(content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with listening(app) as collector.url:
        yield collector
