"""What only the engine can count stands in the recording: evaluations tell cost from it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from polar.engines.base import GenerateRequest, TokenChunk
from tests.unit.gateway.conftest import SetScene


async def test_tokens_from_the_prefix_cache_are_recorded(
    set_scene: SetScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = await set_scene(["first", "second"])
    generate = scene.engine.generate

    async def counting(request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        cached = 5 if scene.engine.requests else 0
        async for chunk in generate(request):
            yield replace(chunk, cached_tokens=cached)
            cached = 0

    monkeypatch.setattr(scene.engine, "generate", counting)
    for content in ("Hi", "Ho"):
        async with scene.post(scene.body(content)) as response:
            assert response.status == 200
    first, second = await scene.captured()
    assert (first.cached_tokens, second.cached_tokens) == (0, 5)
    assert "cached_tokens" not in first.extra
    assert second.prompt_tokens == len(second.prompt_ids) > 5
