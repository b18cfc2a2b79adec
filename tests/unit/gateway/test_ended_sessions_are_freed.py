"""A session's conversations may hold millions of tokens: they do not wait for the garbage collector."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from polar.gateway.session import Session
from tests.fakes.garbage import alive, no_garbage_collector
from tests.unit.gateway.conftest import SetScene


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_session_is_freed_when_it_ends(set_scene: SetScene, stream: bool) -> None:
    scene = await set_scene(["Hello."])
    freed = asyncio.Event()
    with no_garbage_collector():
        mine = [one for one in alive(Session) if one.grant is scene.grant]
        _watched = weakref.ref(mine.pop(), lambda _session: freed.set())
        async with scene.post(scene.body(stream=stream)) as response:
            assert response.status == 200
            await response.read()
        # A connection that is kept open holds the request that came over it last.
        await scene.http.close()
        await scene.gateway.close_session(scene.grant.session_id)
        await asyncio.wait_for(freed.wait(), 10)
