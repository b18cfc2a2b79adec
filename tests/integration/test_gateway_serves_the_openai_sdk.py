"""The official OpenAI SDK works against the gateway unchanged, and its errors are of its own classes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.base import EngineDown, EngineError
from polar.engines.embedded.weights import ensure_model
from polar.gateway.capture import read_capture
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from tests.fakes.scripted_engine import Script, ScriptedEngine

MODEL = "scripted"
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Execute a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


@dataclass
class Service:
    gateway: Gateway
    engine: ScriptedEngine
    grant: SessionGrant
    client: AsyncOpenAI


Serve = Callable[..., Awaitable[Service]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    directory = ensure_model(DEFAULT_MODEL)
    async with AsyncExitStack() as stack:

        async def service(*script: Script, **settings: object) -> Service:
            engine = ScriptedEngine(Tokenizer.from_file(str(directory / "tokenizer.json")), script)
            renderer = renderer_for(DEFAULT_MODEL, directory)
            gateway = await stack.enter_async_context(
                Gateway(GatewaySettings(**settings), engine, renderer, engine.info)
            )
            grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
            await gateway.open_session(grant)
            client = AsyncOpenAI(
                base_url=f"http://{gateway.host}:{gateway.port}/v1", api_key=grant.key, max_retries=0
            )
            await stack.enter_async_context(client)
            return Service(gateway, engine, grant, client)

        yield service


async def test_a_plain_completion(serve: Serve) -> None:
    service = await serve("Hello.")
    completion = await service.client.chat.completions.create(model=MODEL, messages=ASK)
    assert completion.choices[0].message.content == "Hello."
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len(service.engine.encode("Hello."))


async def test_a_streamed_completion(serve: Serve) -> None:
    service = await serve("Hello, wörld 🙂.")
    stream = await service.client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, wörld 🙂."
    assert len([chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]) > 2
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_loop_extends_the_sampled_tokens_exactly(serve: Serve, streamed: bool) -> None:
    service = await serve(
        'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "Two files."
    )
    completions = service.client.chat.completions
    messages = [*ASK]
    message: ChatCompletionMessage
    if streamed:
        async with completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
            message = (await stream.get_final_completion()).choices[0].message
    else:
        answer = await completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert answer.choices[0].finish_reason == "tool_calls"
        message = answer.choices[0].message
    assert message.tool_calls is not None
    call = message.tool_calls[0]
    assert call.type == "function"
    assert (message.content, call.function.name, call.function.arguments) == (
        "I look.",
        "bash",
        '{"command": "ls"}',
    )
    messages += [
        message.model_dump(exclude_none=True, exclude={"parsed"}),
        {"role": "tool", "tool_call_id": call.id, "content": "a\nb"},
    ]
    last = await completions.create(model=MODEL, messages=messages, tools=TOOLS)
    assert last.choices[0].message.content == "Two files."
    await service.gateway.close_session("s1")
    first, second = read_capture(service.grant.capture)
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.parent == first.id
    assert second.prompt_ids.tolist()[: len(before)] == before
    assert len(second.prompt_ids) > len(before)
    assert second.messages[-1].content == "a\nb"


async def test_models_are_listed(serve: Serve) -> None:
    service = await serve()
    assert [model.id async for model in service.client.models.list()] == [MODEL]


async def test_an_unknown_key_is_an_authentication_error(serve: Serve) -> None:
    service = await serve()
    stranger = service.client.with_options(api_key="polar-wrong")
    with pytest.raises(openai.AuthenticationError) as caught:
        await stranger.chat.completions.create(model=MODEL, messages=ASK)
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        [model async for model in stranger.models.list()]


async def test_an_unknown_model_and_route_are_not_found(serve: Serve) -> None:
    service = await serve()
    with pytest.raises(openai.NotFoundError) as caught:
        await service.client.chat.completions.create(model="other", messages=ASK)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as caught:
        await service.client.embeddings.create(model=MODEL, input="x")
    assert caught.value.code == "unknown_url"


async def test_a_malformed_request_is_a_bad_request(serve: Serve) -> None:
    service = await serve()
    with pytest.raises(openai.BadRequestError) as caught:
        await service.client.chat.completions.create(model=MODEL, messages=[*ASK, {"role": "x"}])  # type: ignore[typeddict-item]
    assert caught.value.param == "messages[1].role"


async def test_a_body_over_the_limit_is_refused(serve: Serve) -> None:
    service = await serve(max_body_bytes=2048)
    with pytest.raises(openai.APIStatusError) as caught:
        await service.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 4096}]
        )
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


async def test_an_ended_session_is_gone(serve: Serve) -> None:
    service = await serve()
    await service.gateway.close_session("s1")
    with pytest.raises(openai.APIStatusError) as caught:
        await service.client.chat.completions.create(model=MODEL, messages=ASK)
    assert caught.value.status_code == 410


async def test_engine_trouble_is_a_server_error_without_its_details(serve: Serve) -> None:
    service = await serve(EngineDown("http://inside:1 refused"), EngineError("CUDA"), EngineError("CUDA"))
    statuses = []
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as caught:
            await service.client.chat.completions.create(model=MODEL, messages=ASK)
        statuses.append(caught.value.status_code)
        assert "inside" not in str(caught.value)
        assert "CUDA" not in str(caught.value)
    assert statuses == [503, 502]
    with pytest.raises(openai.APIError, match="failed to answer"):
        async for _ in await service.client.chat.completions.create(model=MODEL, messages=ASK, stream=True):
            pass


async def test_a_key_opens_only_its_own_session(serve: Serve, tmp_path: Path) -> None:
    service = await serve("one", "two")
    other = SessionGrant("s2", new_key(), tmp_path / "other", SamplingPin(), Budgets())
    await service.gateway.open_session(other)
    await service.client.chat.completions.create(model=MODEL, messages=ASK)
    second = service.client.with_options(api_key=other.key)
    await second.chat.completions.create(model=MODEL, messages=ASK)
    await service.gateway.close_session("s1")
    await service.gateway.close_session("s2")
    assert [made.response.content for made in read_capture(service.grant.capture)] == ["one"]
    assert [made.response.content for made in read_capture(other.capture)] == ["two"]
    secrets = (service.grant.key.encode(), other.key.encode())
    assert not any(key in path.read_bytes() for key in secrets for path in tmp_path.iterdir())


async def test_errors_at_unknown_addresses_are_json_for_every_method(serve: Serve) -> None:
    service = await serve()
    url = f"http://{service.gateway.host}:{service.gateway.port}"
    async with aiohttp.ClientSession() as http:
        for method, path in (("GET", "/"), ("GET", "/v1/chat/completions"), ("DELETE", "/v1/models")):
            async with http.request(method, url + path) as response:
                assert response.status == 404
                assert (await response.json())["error"]["type"] == "invalid_request_error"
