"""A gateway in front of a scripted engine, with one open session: what clients of providers are tried on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from tests.captures import read_capture
from tests.fakes.scripted_engine import Script, ScriptedEngine
from tests.fakes.thinking_renderer import thinking_renderer

MODEL = "scripted"
CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


@dataclass
class Service:
    gateway: Gateway
    engine: ScriptedEngine
    grant: SessionGrant

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def key(self) -> str:
        return self.grant.key

    async def captured(self) -> list[Completion]:
        """What was recorded; ends the session."""
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


@asynccontextmanager
async def served(
    directory: Path,
    *script: Script,
    name: str = MODEL,
    budgets: Budgets | None = None,
    max_context: int = 8192,
    thinks: bool = False,
    **settings: object,
) -> AsyncIterator[Service]:
    model = ensure_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engine = ScriptedEngine(tokenizer, script, name=name, max_context=max_context, repeat_last=True)
    renderer = thinking_renderer(model) if thinks else renderer_for("x", model, tool_prompt=True)
    async with Gateway(GatewaySettings(**settings), engine, renderer, engine.info) as gateway:
        grant = SessionGrant("s1", new_key(), directory / "capture", SamplingPin(), budgets or Budgets())
        gateway.open_session(grant)
        yield Service(gateway, engine, grant)
