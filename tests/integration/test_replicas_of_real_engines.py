"""Two real engine servers as one: a session keeps its prefix cache, and survives the loss of its server."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from polar.config.settings import EngineSettings
from polar.engines.base import GenerateRequest, TokenChunk
from polar.engines.embedded.model import load
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.replicas import Replicas, ranking
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from tests.fakes.tiny_llama import CONTEXT, write_tiny_llama


async def test_a_session_keeps_its_cache_and_survives_the_loss_of_its_server(tmp_path: Path) -> None:
    settings = EngineSettings(model=str(write_tiny_llama(tmp_path / "tiny")), device="cpu", slots=2)
    async with AsyncExitStack() as parts:
        servers: dict[str, AsyncExitStack] = {}
        for _ in range(2):
            lifetime = await parts.enter_async_context(AsyncExitStack())
            server = await lifetime.enter_async_context(EmbeddedServer(load(settings)))
            servers[server.url] = lifetime
        replicas = Replicas({url: VllmEngine(url) for url in servers}, first_backoff_seconds=60)
        parts.push_async_callback(replicas.close)
        assert (await replicas.model_info()).max_context == CONTEXT
        await replicas.check()

        async def turn(prompt: list[int]) -> tuple[list[int], int]:
            request = GenerateRequest(
                f"turn-{len(prompt)}", prompt, Sampling(temperature=0.0, max_tokens=8), session="one"
            )
            chunks: list[TokenChunk] = [chunk async for chunk in replicas.generate(request)]
            return [id for chunk in chunks for id in chunk.ids], max(chunk.cached_tokens for chunk in chunks)

        prompt = list(range(40, 90))
        first, _ = await turn(prompt)
        longer = [*prompt, *first, *range(100, 110)]
        second, cached = await turn(longer)
        assert cached >= len(prompt)
        await servers[ranking("one", servers)[0]].aclose()
        moved, cached = await turn(longer)
        assert moved == second
        assert cached == 0
        _, cached = await turn(longer)
        assert cached >= len(prompt)
