"""The official SDKs get output that conforms, from the real small model through the gateway."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from anthropic import AsyncAnthropic
from google import genai
from google.genai import types
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from polar.config.settings import DEFAULT_MODEL, EngineSettings, GatewaySettings
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.embedded.weights import ensure_model
from polar.engines.vllm import VllmEngine
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from tests.captures import read_capture

pytestmark = pytest.mark.model

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
ASK = "What is the weather in Rome?"


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    is_sunny: bool


@pytest.fixture(scope="module")
def model() -> SlotModel:
    torch.set_num_threads(1)
    return load(EngineSettings(device="cpu", slots=2, max_context=2048))


@dataclass
class Service:
    gateway: Gateway
    grant: SessionGrant

    @property
    def url(self) -> str:
        return f"http://{self.gateway.host}:{self.gateway.port}"

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


@pytest.fixture
async def service(model: SlotModel, tmp_path: Path) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(EmbeddedServer(model))
        engine = VllmEngine(server.url)
        stack.push_async_callback(engine.close)
        renderer = renderer_for(DEFAULT_MODEL, ensure_model(DEFAULT_MODEL), tool_prompt=True)
        gateway = Gateway(GatewaySettings(), engine, renderer, await engine.model_info())
        await stack.enter_async_context(gateway)
        pin = SamplingPin(temperature=1.0, seed=3, max_tokens=60)
        grant = SessionGrant("s", new_key(), tmp_path / "capture", pin, Budgets())
        gateway.open_session(grant)
        yield Service(gateway, grant)


@pytest.fixture
async def openai(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.grant.key, max_retries=0) as client:
        yield client


async def test_openai_chat_parses_a_model(openai: AsyncOpenAI, service: Service) -> None:
    completion = await openai.chat.completions.parse(
        model=DEFAULT_MODEL, messages=[{"role": "user", "content": ASK}], response_format=Weather
    )
    assert isinstance(completion.choices[0].message.parsed, Weather)
    assert completion.choices[0].finish_reason == "stop"
    (recorded,) = await service.captured()
    assert recorded.extra["constraint"] == "json_schema"
    assert len(recorded.sampled_ids) == len(recorded.logprobs) > 0
    assert (recorded.logprobs <= 0).all()


async def test_openai_chat_must_call_the_tool_it_is_told_to(openai: AsyncOpenAI) -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
        for name in ("look", "guess")
    ]
    completion = await openai.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": ASK}],
        tools=tools,
        tool_choice={"type": "function", "function": {"name": "guess"}},
        parallel_tool_calls=False,
    )
    assert completion.choices[0].finish_reason == "tool_calls"
    calls = completion.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert call.type == "function"
    assert call.function.name == "guess"
    _check_arguments(json.loads(call.function.arguments))


async def test_openai_responses_parses_a_model(openai: AsyncOpenAI) -> None:
    response = await openai.responses.parse(model=DEFAULT_MODEL, input=ASK, text_format=Weather)
    assert isinstance(response.output_parsed, Weather)


async def test_openai_is_told_what_is_wrong_with_a_schema(openai: AsyncOpenAI) -> None:
    # A bound below which no string is: nothing a dialect sees, but no grammar can be made of it.
    schema = {"type": "string", "minLength": 5, "maxLength": 2}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(BadRequestError, match="cannot be compiled"):
        await openai.chat.completions.create(
            model=DEFAULT_MODEL, messages=[{"role": "user", "content": ASK}], response_format=wanted
        )


async def test_anthropic_must_call_and_can_answer_in_json(service: Service) -> None:
    async with AsyncAnthropic(base_url=service.url, api_key=service.grant.key, max_retries=0) as client:
        called = await client.messages.create(
            model=DEFAULT_MODEL,
            max_tokens=60,
            messages=[{"role": "user", "content": ASK}],
            tools=[{"name": "look", "input_schema": PARAMETERS}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert called.stop_reason == "tool_use"
        (block,) = called.content
        assert block.type == "tool_use"
        _check_arguments(block.input)
        answered = await client.messages.parse(
            model=DEFAULT_MODEL,
            max_tokens=60,
            messages=[{"role": "user", "content": ASK}],
            output_format=Weather,
        )
        assert isinstance(answered.parsed_output, Weather)


async def test_google_answers_in_a_response_schema(service: Service) -> None:
    client = genai.Client(
        api_key=service.grant.key, http_options=types.HttpOptions(base_url=service.url, api_version="v1beta")
    )
    answer = await client.aio.models.generate_content(
        model=DEFAULT_MODEL,
        contents=ASK,
        config=types.GenerateContentConfig(response_mime_type="application/json", response_schema=Weather),
    )
    assert isinstance(answer.parsed, Weather)
    declaration = types.FunctionDeclaration(name="look", parameters_json_schema=PARAMETERS)
    mode = types.FunctionCallingConfig(mode=types.FunctionCallingConfigMode.ANY)
    called = await client.aio.models.generate_content(
        model=DEFAULT_MODEL,
        contents=ASK,
        config=types.GenerateContentConfig(
            tools=[types.Tool(function_declarations=[declaration])],
            tool_config=types.ToolConfig(function_calling_config=mode),
            automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        ),
    )
    assert called.function_calls
    assert {call.name for call in called.function_calls} == {"look"}
    _check_arguments(called.function_calls[0].args)


def _check_arguments(arguments: Any) -> None:
    assert arguments.keys() == {"city", "unit"}
    assert isinstance(arguments["city"], str)
    assert arguments["unit"] in ("C", "F")
