"""Constraints hold on a real vLLM server: a JSON schema, a forced tool call, a bias, and a clear refusal."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from polar.app.stack import data_plane
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.gateway.session import SessionGrant, new_key
from polar.models.task import Budgets, SamplingPin

pytestmark = pytest.mark.timeout(600)

ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "guess")
]


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    is_sunny: bool


@pytest.fixture
async def client(vllm_url: str, tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    settings = Settings(data_dir=tmp_path, engine=EngineSettings(url=vllm_url, model=DEFAULT_MODEL))
    async with data_plane(settings, lambda _step: None) as plane:
        pin = SamplingPin(temperature=1.0, seed=7, max_tokens=100)
        grant = SessionGrant("s", new_key(), tmp_path / "capture", pin, Budgets())
        plane.gateway.open_session(grant)
        async with AsyncOpenAI(
            base_url=f"{plane.gateway.url}/v1", api_key=grant.key, max_retries=0
        ) as opened:
            yield opened


async def test_the_answer_matches_a_json_schema(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.parse(
        model=DEFAULT_MODEL, messages=ASK, response_format=Weather
    )
    assert isinstance(completion.choices[0].message.parsed, Weather)
    assert completion.choices[0].finish_reason == "stop"


async def test_a_tool_that_must_be_called_is_called_once(client: AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "guess"}}
    completion = await client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "guess"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "unit"}
    assert arguments["unit"] in ("C", "F")
    assert completion.choices[0].finish_reason == "tool_calls"


async def test_a_tool_that_may_not_be_called_is_not(client: AsyncOpenAI) -> None:
    completion = await client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, tools=TOOLS, tool_choice="none", max_tokens=20
    )
    assert not completion.choices[0].message.tool_calls
    assert "<tool_call>" not in (completion.choices[0].message.content or "")


async def test_a_bias_bans_a_token(client: AsyncOpenAI) -> None:
    banned = {str(id): -100 for id in range(1000)}
    free = await client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, max_tokens=8, logit_bias={"28": 100}
    )
    assert free.choices[0].message.content == "," * 8
    without = await client.chat.completions.create(
        model=DEFAULT_MODEL, messages=ASK, max_tokens=8, logit_bias=banned
    )
    assert "," not in (without.choices[0].message.content or "")


async def test_a_schema_vllm_cannot_compile_is_the_client_s_error(client: AsyncOpenAI) -> None:
    schema = {"type": "string", "pattern": "(?<=a)b("}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(BadRequestError, match="cannot be held"):
        await client.chat.completions.create(model=DEFAULT_MODEL, messages=ASK, response_format=wanted)
