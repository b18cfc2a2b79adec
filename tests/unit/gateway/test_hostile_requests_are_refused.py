"""Whatever is thrown at a dialect's address comes back as a 4xx in its words: no 5xx, no hang, no capture."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from polar.config.settings import GatewaySettings
from tests.unit.gateway.conftest import SetScene

ADDRESSES = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic_messages": "/v1/messages",
    "google_generate": "/v1beta/models/other:generateContent",
}
BODIES: dict[str, dict[str, Any]] = {
    "openai_chat": {"model": "other", "messages": [{"role": "user", "content": "hi"}], "tools": []},
    "openai_responses": {"model": "other", "input": [{"role": "user", "content": "hi"}], "tools": []},
    "anthropic_messages": {
        "model": "other",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    },
    "google_generate": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}], "tools": [{}]},
}
"""Sound but for the model they name, so that even an unharmed one is refused."""
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    1e308,
    "",
    "\ud800",
    "x" * 10_000,
    [],
    {},
    [[[]]],
    {"a": {"b": [1, None]}},
    "\0",
]


def mutated(body: Any, chance: random.Random) -> Any:
    """The document with one of its parts replaced by something that does not belong there."""
    if not isinstance(body, dict | list) or not body or chance.random() < 0.3:
        return chance.choice(HOSTILE)
    copy = body.copy()
    at = chance.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    copy[at] = mutated(copy[at], chance)
    return copy


def bodies(dialect: str) -> list[bytes]:
    chance = random.Random(dialect)
    sound = json.dumps(BODIES[dialect]).encode()
    return [
        *(json.dumps(mutated(BODIES[dialect], chance)).encode() for _ in range(150)),
        *(sound[:cut] for cut in range(0, len(sound), 3)),
        *(bytes(chance.randrange(256) for _ in range(chance.randrange(60))) for _ in range(50)),
        sound.replace(b"hi", b"\xff\xfe\xc3"),
        b"[" * 100_000,
        b'{"model":' * 50_000,
        b"null",
        b'"text"',
    ]


@pytest.mark.parametrize("dialect", ADDRESSES)
async def test_any_body_is_refused_in_the_dialect_s_shape(set_scene: SetScene, dialect: str) -> None:
    scene = await set_scene([])
    url = scene.url.replace("/v1/chat/completions", ADDRESSES[dialect])
    headers = {"Authorization": f"Bearer {scene.grant.key}", "Content-Type": "application/json"}

    async def refused(body: bytes) -> None:
        async with asyncio.timeout(20), scene.http.post(url, data=body, headers=headers) as response:
            answer = await response.json(content_type=None)
            assert 400 <= response.status < 500, (body[:200], answer)
            assert isinstance(answer["error"]["message"], str), body[:200]

    for body in bodies(dialect):
        await refused(body)
    assert not scene.engine.requests
    assert not await scene.captured()


@pytest.mark.parametrize("dialect", ADDRESSES)
async def test_a_body_over_the_limit_is_413_without_being_kept(set_scene: SetScene, dialect: str) -> None:
    scene = await set_scene([], settings=GatewaySettings(max_body_bytes=1 << 20))
    url = scene.url.replace("/v1/chat/completions", ADDRESSES[dialect])
    headers = {"Authorization": f"Bearer {scene.grant.key}"}

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b" " * (1 << 20)

    async with scene.http.post(url, data=endless(), headers=headers) as response:
        assert response.status == 413
        assert (await response.json(content_type=None))["error"]["message"]


@pytest.mark.parametrize(
    "value", ["\x01", "Bearer", "Bearer " + "k" * 8000, "Basic YTpi", "Bearer ключ", "é" * 10]
)
@pytest.mark.parametrize("dialect", ADDRESSES)
async def test_a_hostile_key_opens_nothing(set_scene: SetScene, dialect: str, value: str) -> None:
    scene = await set_scene([])
    url = scene.url.replace("/v1/chat/completions", ADDRESSES[dialect])
    reader, writer = await asyncio.open_connection(scene.gateway.host, scene.gateway.port)
    path = url.split(str(scene.gateway.port), 1)[1]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {value}\r\nx-api-key: {value}\r\n"
    writer.write(head.encode() + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}")
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert answer.split()[1][:1] == b"4", answer[:200]
    assert not scene.engine.requests
