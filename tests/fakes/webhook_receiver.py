"""A receiver of webhooks as a user would write one: it verifies, handles, remembers and answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from polar.models.views import Notice
from polar.webhooks import InvalidNotice, Recent, ReplayedNotice, verify
from tests.listening import listening


@dataclass
class Receiver:
    """What came, and what is to be answered."""

    secret: str
    url: str = ""
    failing: int = 0
    """So many requests are answered with 500 before one is handled."""
    hanging: asyncio.Event | None = None
    """Requests get no answer before this is set."""
    notices: list[Notice] = field(default_factory=list)
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    replays: int = 0
    came: asyncio.Condition = field(default_factory=asyncio.Condition)
    _seen: Recent = field(default_factory=Recent)

    async def until_handled(self, count: int) -> list[Notice]:
        async with asyncio.timeout(30), self.came:
            await self.came.wait_for(lambda: len(self.notices) >= count)
        return self.notices

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(30), self.came:
            await self.came.wait_for(lambda: len(self.requests) >= count)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append((dict(request.headers), body))
        status = 500 if self.hanging else self._status(dict(request.headers), body)
        async with self.came:
            self.came.notify_all()
        if self.hanging:
            await self.hanging.wait()
        return web.Response(status=status)

    def _status(self, headers: dict[str, str], body: bytes) -> int:
        if self.failing:
            self.failing -= 1
            return 500
        try:
            notice = verify(self.secret, headers, body, seen=self._seen)
        except InvalidNotice:
            return 400
        except ReplayedNotice:
            self.replays += 1
            return 200
        self.notices.append(notice)
        self._seen.add(notice.id)
        return 200


@asynccontextmanager
async def receiving(secret: str, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    """A receiver on a free port of this machine."""
    receiver = Receiver(secret)
    app = web.Application()
    app.router.add_post("/hook", receiver.handle)
    async with listening(app, tls) as url:
        receiver.url = f"{url}/hook"
        yield receiver
