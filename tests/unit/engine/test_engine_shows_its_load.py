"""The embedded engine's page of metrics tells its load and what its prefix cache saved."""

from __future__ import annotations

import aiohttp

from polar.engines.embedded.server import EmbeddedServer
from polar.engines.vllm import VllmEngine
from polar.telemetry.readings import Readings

PROMPT = list(range(30, 60))


async def test_a_prompt_that_comes_again_is_a_hit(server: EmbeddedServer) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        for _ in range(2):
            async with http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3}) as response:
                assert response.status == 200
    engine = VllmEngine(server.url)
    try:
        readings = (await engine.readings())[server.url]
    finally:
        await engine.close()
    assert readings is not None
    assert (readings.requests_running, readings.requests_waiting) == (0, 0)
    assert readings.prompt_tokens == 2 * len(PROMPT)
    # The last token of a prompt is computed in any case.
    assert readings.cached_tokens == len(PROMPT) - 1
    assert 2 <= (readings.sampled_tokens or 0) <= 6
    assert 0 < (readings.kv_usage_ratio or 0) < 1


async def test_an_engine_that_is_gone_is_told_from_one_that_says_nothing(server: EmbeddedServer) -> None:
    unreachable = VllmEngine("http://127.0.0.1:9")
    silent = VllmEngine(f"{server.url}/nowhere")
    try:
        assert await unreachable.readings() == {"http://127.0.0.1:9": None}
        assert await silent.readings() == {f"{server.url}/nowhere": Readings()}
    finally:
        await unreachable.close()
        await silent.close()


async def test_the_page_names_version_and_pause(server: EmbeddedServer) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        async with http.post("/pause?mode=keep"):
            pass
        async with http.get("/metrics") as response:
            page = await response.text()
            assert response.content_type == "text/plain"
        async with http.post("/resume"):
            pass
    assert "polar_engine_policy_version 0.0" in page
    assert "polar_engine_paused 1.0" in page
    assert "process_resident_memory_bytes" in page
