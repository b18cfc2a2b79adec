"""The official OpenAI SDK works against the gateway unchanged, and its errors are of its own classes."""

from __future__ import annotations

import asyncio
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
from polar.engines.base import EngineDown, EngineError, GenerateRequest
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.chat import FinishReason
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from polar.trajectory.materialise import materialise
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow, read_capture
from tests.fakes.scripted_engine import Answer, Script, ScriptedEngine

MODEL = "scripted"
CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
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

        async def service(*script: Script, budgets: Budgets | None = None, **settings: object) -> Service:
            engine = ScriptedEngine(Tokenizer.from_file(str(directory / "tokenizer.json")), script)
            renderer = renderer_for(DEFAULT_MODEL, directory, tool_prompt=True)
            gateway = await stack.enter_async_context(
                Gateway(GatewaySettings(**settings), engine, renderer, engine.info)
            )
            grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), budgets or Budgets())
            gateway.open_session(grant)
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
async def test_logprobs_that_are_asked_for_are_those_that_were_recorded(serve: Serve, streamed: bool) -> None:
    service = await serve("Hello, wörld 🙂.")
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    if streamed:
        async with service.client.chat.completions.stream(**asked, logprobs=True) as stream:
            answer: Any = await stream.get_final_completion()
    else:
        answer = await service.client.chat.completions.create(**asked, logprobs=True, top_logprobs=0)
    told = answer.choices[0].logprobs.content
    await service.gateway.close_session("s1")
    (completion,) = read_capture(service.grant.capture)
    assert [one.logprob for one in told] == completion.logprobs.tolist()
    assert b"".join(bytes(one.bytes) for one in told).decode() == "Hello, wörld 🙂.<|im_end|>"
    assert [one.top_logprobs for one in told] == [[]] * len(told)


async def test_logprobs_that_nobody_asks_for_are_not_told_and_others_are_refused(serve: Serve) -> None:
    service = await serve("Hello.")
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    assert (await service.client.chat.completions.create(**asked)).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError) as refused:
        await service.client.chat.completions.create(**asked, logprobs=True, top_logprobs=5)
    assert refused.value.param == "top_logprobs"


@pytest.mark.parametrize("streamed", [False, True])
async def test_functions_from_before_there_were_tools_are_called_in_their_own_shape(
    serve: Serve, streamed: bool
) -> None:
    call = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    service = await serve(call, "Two files.")
    asked: dict[str, Any] = {"model": MODEL, "functions": [TOOLS[0]["function"]]}
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    create = service.client.chat.completions.create
    if streamed:
        chunks = [chunk async for chunk in await create(messages=messages, stream=True, **asked)]
        finish = chunks[-1].choices[0].finish_reason
        called = next(delta for chunk in chunks if (delta := chunk.choices[0].delta.function_call))
        assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
    else:
        choice = (await create(messages=messages, **asked)).choices[0]
        finish, called = choice.finish_reason, choice.message.function_call
        assert choice.message.tool_calls is None
    assert (finish, called.name, called.arguments) == ("function_call", "bash", '{"command": "ls"}')
    messages += [
        {"role": "assistant", "content": "I look.", "function_call": called.model_dump()},
        {"role": "function", "name": "bash", "content": "a\nb"},
    ]
    assert (await create(messages=messages, **asked)).choices[0].message.content == "Two files."
    await service.gateway.close_session("s1")
    first, second = read_capture(service.grant.capture)
    assert second.parent == first.id


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
    service.gateway.open_session(other)
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


async def test_several_choices_are_sampled_and_recorded_as_siblings(serve: Serve) -> None:
    said = ["One.", "Two.", "Three."]
    service = await serve(*said, "Four.")
    completion = await service.client.chat.completions.create(model=MODEL, messages=ASK, n=3, seed=7)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert sorted(choice.message.content or "" for choice in completion.choices) == sorted(said)
    assert len({request.sampling.seed for request in service.engine.requests}) == 3
    assert completion.usage is not None
    assert completion.usage.completion_tokens == sum(len(service.engine.encode(text)) for text in said)
    taken = completion.choices[1].message
    again: list[Any] = [*ASK, taken.model_dump(exclude_none=True), {"role": "user", "content": "Go on"}]
    await service.client.chat.completions.create(model=MODEL, messages=again)
    await service.gateway.close_session("s1")
    *siblings, last = read_capture(service.grant.capture)
    assert len(siblings) == 3
    assert {sibling.prompt_ids.tobytes() for sibling in siblings} == {siblings[0].prompt_ids.tobytes()}
    assert [sibling.parent for sibling in siblings] == [None] * 3
    (parent,) = [sibling for sibling in siblings if sibling.id == last.parent]
    assert parent.response.content == taken.content
    assert completion.usage.prompt_tokens == len(parent.prompt_ids)


async def test_several_choices_are_streamed_with_their_index(serve: Serve) -> None:
    said = ["One and more.", CALL, "Three."]
    service = await serve(*said)
    stream = await service.client.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, n=3, stream=True, stream_options={"include_usage": True}
    )
    texts: dict[int, str] = {}
    calls: dict[int, list[str]] = {}
    ends: dict[int, str] = {}
    usages = []
    async for chunk in stream:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for call in choice.delta.tool_calls or ():
                assert call.index == 0
                calls.setdefault(choice.index, []).append(call.id or "")
            if choice.finish_reason:
                assert choice.index not in ends
                ends[choice.index] = choice.finish_reason
    assert {text.strip() for text in texts.values()} == {"One and more.", "I look.", "Three."}
    assert sorted(ends.values()) == ["stop", "stop", "tool_calls"]
    assert [ends[index] for index in calls] == ["tool_calls"]
    assert [usage.completion_tokens for usage in usages] == [
        sum(len(service.engine.encode(text)) for text in said)
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_choice_is_a_leaf_and_every_token_is_trained_once(serve: Serve, streamed: bool) -> None:
    service = await serve("One.", "Two two.", "Three three three.")
    asked: Any = {"model": MODEL, "messages": ASK, "n": 3}
    if streamed:
        async for _ in await service.client.chat.completions.create(stream=True, **asked):
            pass
    else:
        await service.client.chat.completions.create(**asked)
    await service.gateway.close_session("s1")
    completions = read_capture(service.grant.capture)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions))
    traces = [materialise(trajectory, ref) for ref in trajectory.traces]
    assert [trace.prompt_ids.tolist() for trace in traces] == [completions[0].prompt_ids.tolist()] * 3
    assert all(trace.loss_mask.all() for trace in traces)
    assert sorted(trace.response_ids.tolist() for trace in traces) == sorted(
        completion.sampled_ids.tolist() for completion in completions
    )


async def test_choices_count_against_the_budget(serve: Serve) -> None:
    service = await serve("One.", "Two.", budgets=Budgets(max_completions=3))
    await service.client.chat.completions.create(model=MODEL, messages=ASK, n=2)
    assert service.gateway.progress("s1").completions == 2
    with pytest.raises(openai.BadRequestError):
        await service.client.chat.completions.create(model=MODEL, messages=ASK, n=2)


async def test_a_choice_that_fails_ends_the_others(serve: Serve) -> None:
    fails, never = asyncio.Event(), asyncio.Event()

    def last_to_begin(_request: GenerateRequest) -> Answer:
        fails.set()
        return Answer("Three.", gate=never)

    service = await serve(
        "One.", Answer("Two.", gate=fails, failure=EngineError("no"), fail_at=1), last_to_begin
    )
    with pytest.raises(openai.APIStatusError) as failed:
        await service.client.chat.completions.create(model=MODEL, messages=ASK, n=3)
    assert failed.value.status_code == 502
    await service.gateway.close_session("s1")
    ends = [completion.finish_reason for completion in read_capture(service.grant.capture)]
    assert (len(ends), ends.count(FinishReason.ERROR)) == (3, 1)
    assert FinishReason.CANCELLED in ends
