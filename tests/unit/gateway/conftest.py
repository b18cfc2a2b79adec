"""A started gateway over a scripted engine, with one open session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.embedded.weights import ensure_model
from polar.gateway.playback import Playback
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.recordings.capture import parse_capture
from polar.recordings.tree import TokenTree
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from tests.fakes.scripted_engine import Script, ScriptedEngine


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ensure_model(DEFAULT_MODEL) / "tokenizer.json"))


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return renderer_for("x", ensure_model(DEFAULT_MODEL), tool_prompt=True)


@dataclass
class Scene:
    gateway: Gateway
    engine: ScriptedEngine
    grant: SessionGrant
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://{self.gateway.host}:{self.gateway.port}/v1/chat/completions"

    def body(self, content: str = "Hi", **fields: object) -> dict[str, object]:
        return {"model": "scripted", "messages": [{"role": "user", "content": content}]} | fields

    def post(self, body: object, key: str | None = None) -> aiohttp.client._RequestContextManager:
        headers = {"Authorization": f"Bearer {key or self.grant.key}"}
        return self.http.post(self.url, json=body, headers=headers)

    async def captured(self) -> list[Completion]:
        return list((await self.tree()).completions)

    async def tree(self) -> TokenTree:
        """What was recorded; ends the session. Nothing may be lost."""
        await self.gateway.close_session(self.grant.session_id)
        tree = parse_capture(self.grant.capture.read_bytes())
        assert not tree.faults, tree.faults
        return tree


SetScene = Callable[..., Awaitable[Scene]]


@pytest.fixture
async def set_scene(tokenizer: Tokenizer, renderer: Renderer, tmp_path: Path) -> AsyncIterator[SetScene]:
    async with AsyncExitStack() as stack:

        async def scene(
            script: Sequence[Script],
            *,
            budgets: Budgets | None = None,
            sampling: SamplingPin | None = None,
            settings: GatewaySettings | None = None,
            max_context: int = 8192,
            sample: int = 0,
            records_routing: bool = False,
            playback: Playback | None = None,
        ) -> Scene:
            engine = ScriptedEngine(
                tokenizer, script, max_context=max_context, records_routing=records_routing
            )
            gateway = Gateway(settings or GatewaySettings(), engine, renderer, engine.info)
            await stack.enter_async_context(gateway)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            grant = SessionGrant(
                "s1",
                new_key(),
                tmp_path / f"{gateway.port}.capture",
                sampling or SamplingPin(),
                budgets or Budgets(),
                sample,
                playback=playback,
            )
            gateway.open_session(grant)
            return Scene(gateway, engine, grant, http)

        yield scene
