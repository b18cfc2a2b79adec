"""Vercel's `ai`, unmodified, runs a loop of several steps, and each step extends the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.task import Budgets, SamplingPin
from tests.captures import read_capture
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.thinking_renderer import thinking_renderer
from tests.vercel import run_tool_loop

CALL = (
    "Which city?\nI look.\n<tool_call>\n"
    + json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
    + "\n</tool_call>"
)
TWO_CALLS = CALL + CALL[CALL.index("\n<tool_call>") :].replace("Oslo", "Bergen")


@pytest.mark.parametrize("mode", ["stream", "whole"])
async def test_its_default_openai_provider_refers_to_items_it_was_given(tmp_path: Path, mode: str) -> None:
    directory = ensure_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    engine = ScriptedEngine(tokenizer, [CALL, TWO_CALLS, "Hm.\nRain."])
    renderer = thinking_renderer(directory)
    async with Gateway(GatewaySettings(), engine, renderer, engine.info) as gateway:
        grant = SessionGrant("s", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
        gateway.open_session(grant)
        environment = {
            "OPENAI_BASE_URL": f"http://{gateway.host}:{gateway.port}/v1",
            "OPENAI_API_KEY": grant.key,
        }
        assert await run_tool_loop("openai", engine.info.name, mode, environment) == "Rain."
        await gateway.close_session("s")
    first, second, third = read_capture(grant.capture)
    assert (first.dialect, second.parent, third.parent) == ("openai_responses", first.id, second.id)
    assert [message.content for message in third.messages[-2:]] == ["rain in Oslo", "rain in Bergen"]
