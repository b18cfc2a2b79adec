"""One of a node's several gateways, in a process of its own: `python -m polar.gateway.worker FD`.

FD is its end of the line to the node, which says over it what to serve. It ends with the line.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop

from polar.engines.clients import engine_client
from polar.engines.embedded.weights import ensure_tokenizer
from polar.gateway.garbage import collect_rarely
from polar.gateway.line import Answering
from polar.gateway.pool import Assignment
from polar.gateway.server import Gateway
from polar.rendering.families import renderer_for
from polar.telemetry import logs
from polar.telemetry.tracing import exporting


@asynccontextmanager
async def gateway_for(assignment: Assignment) -> AsyncIterator[Gateway]:
    settings, name = assignment.settings, assignment.tokenizer
    engine = engine_client(settings.engine, settings.engine.urls)
    try:
        renderer = None
        if name is not None:
            keeps = settings.engine.keeps_thoughts
            renderer = renderer_for(name, ensure_tokenizer(name), keeps_thoughts=keeps)
        model = await engine.model_info()
        async with (
            exporting(settings.telemetry, {"service.instance.id": settings.node.name}),
            Gateway(settings.gateway, engine, renderer, model) as gateway,
        ):
            yield gateway
    finally:
        await engine.close()


async def serve(line: socket.socket) -> None:
    calls = Answering(*await asyncio.open_connection(sock=line))
    number, assignment = await calls.first()
    logs.log_to_stderr(assignment.settings.log_level, assignment.settings.log_format)
    try:
        async with gateway_for(assignment) as gateway:
            collect_rarely()
            calls.answer(number, gateway.port)
            await calls.serve(gateway)
    except Exception as error:
        calls.answer(number, error=error)
        await calls.sent()
        sys.exit(1)


if __name__ == "__main__":
    uvloop.run(serve(socket.socket(fileno=int(sys.argv[1]))))
