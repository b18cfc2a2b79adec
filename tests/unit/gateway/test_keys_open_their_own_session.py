"""The key decides which session a call belongs to, wherever the client can put it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

import pytest

from polar.gateway.server import new_key
from tests.fakes.scripted_engine import Answer
from tests.unit.gateway.conftest import SetScene


async def test_a_key_in_the_path_opens_its_session(set_scene: SetScene) -> None:
    scene = await set_scene(["Hello."])
    url = scene.url.replace("/v1/", f"/k/{scene.grant.key}/v1/")
    async with scene.http.post(url, json=scene.body()) as response:
        assert response.status == 200
    assert len(await scene.captured()) == 1


async def test_the_key_in_the_path_decides_over_one_in_a_header(set_scene: SetScene) -> None:
    scene = await set_scene([])
    url = scene.url.replace("/v1/", f"/k/{new_key()}/v1/")
    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    async with scene.http.post(url, json=scene.body(), headers=headers) as response:
        assert response.status == 401


async def test_no_key_is_logged_when_a_call_fails(
    set_scene: SetScene, caplog: pytest.LogCaptureFixture
) -> None:
    scene = await set_scene([RuntimeError("broken")])
    url = scene.url.replace("/v1/", f"/k/{scene.grant.key}/v1/")
    with caplog.at_level(logging.DEBUG):
        async with scene.http.post(url, json=scene.body()) as response:
            assert response.status >= 500
    assert "broken" in caplog.text
    assert scene.grant.key not in caplog.text


async def test_a_stream_whose_session_ends_is_told_so(set_scene: SetScene) -> None:
    gate = asyncio.Event()
    scene = await set_scene([Answer("Never whole.", gate=gate, gate_at=1)])
    async with scene.post(scene.body(stream=True)) as response:
        await scene.engine.waiting.wait()
        await scene.gateway.close_session(scene.grant.session_id)
        assert "session_ended" in await response.text()


async def test_a_request_whose_session_ends_while_its_body_comes_is_told_so(set_scene: SetScene) -> None:
    scene = await set_scene([])

    async def body() -> AsyncIterator[bytes]:
        await scene.gateway.close_session(scene.grant.session_id)
        yield json.dumps(scene.body()).encode()

    headers = {"Authorization": f"Bearer {scene.grant.key}"}
    # The body is not begun before the gateway, which has seen the key by then, says that it goes on.
    async with scene.http.post(scene.url, data=body(), headers=headers, expect100=True) as response:
        assert response.status == 410
        assert (await response.json())["error"]["code"] == "session_ended"
