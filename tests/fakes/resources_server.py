"""A resources server of NeMo Gym: it knows a rollout by its cookie, and judges what came of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from aiohttp import web

from tests.listening import listening

COOKIE = "gym_session"


@dataclass
class ResourcesServer:
    url: str = ""
    seeded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The cookie that was given → what the rollout was seeded with."""
    carried: list[dict[str, str]] = field(default_factory=list)
    """The cookies that came with each seeding."""
    verified: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The cookie that came back → what was to be judged."""
    reward: float = 0.75
    fails: bool = False


@asynccontextmanager
async def resources_server() -> AsyncIterator[ResourcesServer]:
    server, numbers = ResourcesServer(), count()

    async def seed(request: web.Request) -> web.Response:
        name = f"rollout-{next(numbers)}"
        server.seeded[name] = await request.json()
        server.carried.append(dict(request.cookies))
        response = web.json_response({})
        response.set_cookie(COOKIE, name)
        return response

    async def verify(request: web.Request) -> web.Response:
        if server.fails:
            return web.Response(status=500, text="the verifier broke")
        body = await request.json()
        server.verified[request.cookies[COOKIE]] = body
        return web.json_response({**body, "reward": server.reward, "steps": 3})

    app = web.Application()
    app.add_routes([web.post("/seed_session", seed), web.post("/verify", verify)])
    async with listening(app) as server.url:
        yield server
