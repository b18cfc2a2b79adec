"""What the scripted servers of all engines have in common, whatever wire they speak."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler


@dataclass
class EngineWire:
    """Answers the n-th generation with the n-th entry; the last one repeats."""

    answers: Sequence[Any]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)
    adapters: dict[str, str] = field(default_factory=dict)
    """Those that are loaded, and where they come from."""
    going: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared by a pause: what is asked then waits, and nothing is sampled."""
    authorization: str | None = None
    """What the last request showed."""
    connections: set[asyncio.Transport] = field(default_factory=set)
    url: str = ""

    def __post_init__(self) -> None:
        self.going.set()

    async def start_anew(self) -> None:
        """As a process that ended and was started again: nothing is left of it but its address."""
        self.adapters.clear()
        self.going.set()
        while self.connections:
            self.connections.pop().abort()

    @web.middleware
    async def connected(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert isinstance(request.transport, asyncio.Transport)
        self.connections.add(request.transport)
        self.authorization = request.headers.get("Authorization")
        return await handler(request)

    def next_answer(self, body: dict[str, Any]) -> Any:
        """What the script has for this request, which is taken down."""
        answer = self.answers[min(len(self.bodies), len(self.answers) - 1)]
        self.bodies.append(body)
        self.arrived.set()
        return answer


def likeliest(logits: Iterable[float], temperature: float) -> float:
    """The highest logprob at a temperature."""
    scaled = [logit / temperature for logit in logits]
    return max(scaled) - math.log(sum(map(math.exp, scaled)))
