"""Chat mode behind every dialect: the official SDKs, streaming and not, the engine's tokens captured."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from google import genai
from google.genai import types
from openai import AsyncOpenAI

from polar.config.settings import GatewaySettings
from polar.engines.vllm import VllmEngine
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from tests.captures import read_capture
from tests.fakes.character_chat import Said, logprob_of, prompt_ids
from tests.fakes.vllm_wire import VllmWire, vllm_wire

MODEL = "small"
SAID = Said("I look.", calls=(("ls", {"path": "a"}),))
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}


@dataclass
class Service:
    url: str
    gateway: Gateway
    grant: SessionGrant
    wire: VllmWire

    async def captured(self) -> Completion:
        await self.gateway.close_session("s1")
        (completion,) = read_capture(self.grant.capture)
        return completion


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    async with vllm_wire(SAID) as wire:
        engine = VllmEngine(wire.url)
        try:
            async with Gateway(GatewaySettings(), engine, None, await engine.model_info()) as gateway:
                grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
                gateway.open_session(grant)
                yield Service(f"http://{gateway.host}:{gateway.port}", gateway, grant, wire)
        finally:
            await engine.close()


async def check(service: Service, text: str, name: str | None, arguments: Any) -> None:
    assert (text, name, arguments) == ("I look.", "ls", {"path": "a"})
    completion = await service.captured()
    (asked,) = service.wire.bodies
    assert asked["messages"] == [{"role": "user", "content": "Hi"}]
    assert [tool["function"]["name"] for tool in asked["tools"]] == ["ls"]
    assert completion.prompt_ids.tolist() == prompt_ids(asked)
    assert completion.sampled_ids.tolist() == SAID.tokens
    assert completion.logprobs.tolist() == [logprob_of(id) for id in SAID.tokens]
    assert (completion.untrainable, completion.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(service: Service, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "ls", "parameters": SCHEMA}}
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.grant.key) as client:
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.create(**asked)
    message = completion.choices[0].message
    assert message.tool_calls
    function = message.tool_calls[0].function
    await check(service, message.content or "", function.name, json.loads(function.arguments))


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses(service: Service, stream: bool) -> None:
    tool = {"type": "function", "name": "ls", "parameters": SCHEMA, "strict": False}
    asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": [tool]}
    async with AsyncOpenAI(base_url=f"{service.url}/v1", api_key=service.grant.key) as client:
        if stream:
            async with client.responses.stream(**asked) as events:
                async for _ in events:
                    pass
                response = await events.get_final_response()
        else:
            response = await client.responses.create(**asked)
    (call,) = [item for item in response.output if item.type == "function_call"]
    await check(service, response.output_text, call.name, json.loads(call.arguments))


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_messages(service: Service, stream: bool) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "ls", "input_schema": SCHEMA}],
    }
    async with AsyncAnthropic(base_url=service.url, api_key=service.grant.key) as client:
        if stream:
            async with client.messages.stream(**asked) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**asked)
    text, call = message.content
    assert text.type == "text"
    assert call.type == "tool_use"
    await check(service, text.text, call.name, call.input)


def parts_of(chunk: types.GenerateContentResponse) -> list[types.Part]:
    assert chunk.candidates is not None
    content = chunk.candidates[0].content
    assert content is not None
    return content.parts or []


@pytest.mark.parametrize("stream", [False, True])
async def test_google_generate(service: Service, stream: bool) -> None:
    declared = types.FunctionDeclaration(name="ls", parameters_json_schema=SCHEMA)
    config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
    options = types.HttpOptions(base_url=service.url)
    client = genai.Client(api_key=service.grant.key, http_options=options).aio
    if stream:
        chunks = [
            chunk
            async for chunk in await client.models.generate_content_stream(
                model=MODEL, contents="Hi", config=config
            )
        ]
    else:
        chunks = [await client.models.generate_content(model=MODEL, contents="Hi", config=config)]
    parts = [part for chunk in chunks for part in parts_of(chunk)]
    (call,) = [part.function_call for part in parts if part.function_call]
    await check(service, "".join(part.text or "" for part in parts), call.name, call.args)
