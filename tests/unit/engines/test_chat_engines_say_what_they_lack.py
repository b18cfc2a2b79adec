"""Chat mode of each engine client: what is asked of the server, and what is said when it cannot do it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import pytest

from polar.engines.base import ChatCall, ChatChunk, ContextOverflow, Engine, EngineError, Mode
from polar.engines.openai import DEFAULT_CONTEXT, OpenAIEngine
from polar.engines.replicas import Replicas
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import InvalidInput
from polar.models.chat import ChatRequest, Message, Role, Sampling
from tests.fakes.character_chat import Said, prompt_ids
from tests.fakes.chat_server import chat_server
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.vllm_wire import vllm_wire

Client = TypeVar("Client", bound=Engine)

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=9)
CHAT = ChatRequest("small", (Message(Role.USER, "Hi"),), sampling=SAMPLING, stream=True)
NEEDS_PARSER = (400, {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}})


@asynccontextmanager
async def client(engine: Client) -> AsyncIterator[Client]:
    try:
        yield engine
    finally:
        await engine.close()


async def said(engine: Engine, chat: ChatRequest = CHAT) -> list[ChatChunk]:
    async with client(engine):
        return [chunk async for chunk in engine.chat(ChatCall("r1", chat, chat.sampling, "s"))]


def ids(chunks: Sequence[ChatChunk]) -> list[int]:
    return [id for chunk in chunks if chunk.tokens for id in chunk.tokens.ids]


def prompt_of(chunk: ChatChunk) -> list[int]:
    assert chunk.prompt_ids is not None
    given: list[int] = chunk.prompt_ids.tolist()
    return given


async def test_vllm_streams_where_the_harness_streams_and_only_there() -> None:
    async with vllm_wire(Said("hello")) as wire:
        streamed = await said(VllmEngine(wire.url))
        whole = await said(VllmEngine(wire.url), ChatRequest("small", CHAT.messages))
    assert (len(streamed), len(whole)) == (6, 1)
    assert ids(streamed) == ids(whole) == Said("hello").tokens
    assert prompt_of(streamed[0]) == prompt_of(whole[0]) == prompt_ids(wire.bodies[0])
    assert [body.get("stream", False) for body in wire.bodies] == [True, False]
    asked = wire.bodies[0]
    assert (asked["model"], asked["request_id"], asked["max_tokens"]) == ("small", "r1", 9)
    assert asked["return_token_ids"] is asked["logprobs"] is True


@pytest.mark.parametrize("name", ["token_ids", "response_token_ids"])
async def test_sglang_is_asked_in_one_piece_because_its_streams_have_no_ids(name: str) -> None:
    async with sglang_wire(Said("hello"), ids_name=name, weight_version="12") as wire:
        (chunk,) = await said(SglangEngine(wire.url))
    assert chunk.untrainable is None
    assert chunk.tokens is not None
    assert (chunk.tokens.ids, chunk.tokens.policy_version) == (Said("hello").tokens, 12)
    assert prompt_of(chunk) == prompt_ids(wire.bodies[0])
    assert (wire.bodies[0].get("stream", False), wire.bodies[0]["rid"], wire.bodies[0]["top_k"]) == (
        False,
        "r1",
        -1,
    )


async def test_closing_a_chat_aborts_it_in_sglang() -> None:
    async with sglang_wire(asyncio.Event()) as wire, client(SglangEngine(wire.url)) as engine:
        call = asyncio.create_task(anext(engine.chat(ChatCall("r1", CHAT, CHAT.sampling))))
        await wire.arrived.wait()
        call.cancel()
        await asyncio.wait({call})
        assert await wire.aborted.get() == "r1"


async def test_closing_a_chat_aborts_it_in_vllm() -> None:
    never = asyncio.Event()
    async with vllm_wire([{"choices": [{"delta": {"content": "a"}}]}, never]) as wire:
        async with (
            client(VllmEngine(wire.url)) as engine,
            aclosing(engine.chat(ChatCall("r1", CHAT, CHAT.sampling))) as chunks,
        ):
            await anext(chunks)
        await wire.disconnected.wait()


async def test_the_check_refuses_an_sglang_that_gives_no_ids_with_a_chat() -> None:
    async with (
        sglang_wire(Said("h"), knows_token_ids=False) as wire,
        client(SglangEngine(wire.url)) as engine,
    ):
        with pytest.raises(EngineError, match=r"token ids.*0\.5\.17 or newer"):
            await engine.check(Mode.CHAT)


async def test_the_check_refuses_a_server_without_a_chat_template() -> None:
    no_template = (400, {"error": {"message": "a chat template is required"}})
    async with vllm_wire(no_template) as wire, client(VllmEngine(wire.url)) as engine:
        with pytest.raises(EngineError, match=r"a chat template is required.*vLLM 0\.10\.2"):
            await engine.check(Mode.CHAT)


async def test_the_check_warns_of_a_server_that_reads_no_tool_calls(caplog: pytest.LogCaptureFixture) -> None:
    async with vllm_wire(Said("h"), NEEDS_PARSER) as wire, client(VllmEngine(wire.url)) as engine:
        with caplog.at_level(logging.WARNING):
            await engine.check(Mode.CHAT)
    assert "refuses requests with tools" in caplog.text
    assert "--enable-auto-tool-choice" in caplog.text


async def test_a_good_server_passes_the_check_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    async with vllm_wire(Said("h")) as vllm, sglang_wire(Said("h")) as sglang:
        for engine in (VllmEngine(vllm.url), SglangEngine(sglang.url)):
            async with client(engine):
                await engine.check(Mode.CHAT)
    assert caplog.text == ""


async def test_vllm_counts_the_tokens_of_a_chat() -> None:
    async with vllm_wire(Said("h")) as wire, client(VllmEngine(wire.url)) as engine:
        assert await engine.count_tokens(CHAT) == len(
            prompt_ids({"messages": [{"role": "user", "content": "Hi"}]})
        )


@pytest.mark.parametrize(
    "message",
    [
        "maximum context length is 512 tokens. However, your prompt contains at least 513 input tokens",
        "maximum context length is 512 tokens. However, you requested 600 tokens (513 in the messages, 87 in",
        "Requested token count exceeds the model's maximum context length of 512 tokens. You requested a"
        " total of 600 tokens: 513 tokens from the input messages and 87 tokens for the completion.",
        "The decoder prompt (length 513) is longer than the maximum model length of 512.",
    ],
)
async def test_an_overflow_says_how_long_the_prompt_is(message: str) -> None:
    async with vllm_wire((400, {"error": {"message": message}})) as wire:
        with pytest.raises(ContextOverflow) as overflow:
            await said(VllmEngine(wire.url))
    assert overflow.value.prompt_tokens == 513


async def test_a_chat_moves_to_another_replica_before_its_first_chunk() -> None:
    async with vllm_wire(Said("hello")) as wire:
        replicas = Replicas({"dead": VllmEngine("http://127.0.0.1:9"), "live": VllmEngine(wire.url)})
        chunks = await said(replicas)
    assert ids(chunks) == Said("hello").tokens


async def openai(url: str, **options: Any) -> list[ChatChunk]:
    return await said(OpenAIEngine(url, "sk-test", model="gpt", **options))


async def test_an_openai_endpoint_gives_text_that_is_never_trainable() -> None:
    async with chat_server({"content": "hello"}) as server:
        chunks = await openai(f"{server.url}/v1")
    assert [chunk.tokens for chunk in chunks] == [None] * len(chunks)
    assert "".join(chunk.delta.content for chunk in chunks) == "hello"
    assert chunks[-1].untrainable == "the engine gives no token ids"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.sampled_tokens == 5
    (asked,) = server.asked
    assert asked.headers["Authorization"] == "Bearer sk-test"
    # What an endpoint takes for granted is not said; what no OpenAI endpoint knows is not asked for.
    assert asked.body.keys() == {"model", "messages", "seed", "max_tokens", "stream", "stream_options"}


def refusing(name: str) -> tuple[int, dict[str, Any]]:
    return 400, {"error": {"message": f"Unsupported parameter: '{name}' is not supported with this model."}}


async def test_what_an_openai_endpoint_refuses_is_left_out_from_then_on() -> None:
    answers = (refusing("max_tokens"), refusing("seed"), Said("hello"), Said("again"))
    async with vllm_wire(*answers) as wire, client(OpenAIEngine(wire.url, model="gpt")) as engine:
        for _ in range(2):
            assert [chunk async for chunk in engine.chat(ChatCall("r", CHAT, CHAT.sampling))][
                -1
            ].finish_reason == "stop"
    kept = [body.keys() & {"max_tokens", "max_completion_tokens", "seed"} for body in wire.bodies]
    assert kept == [
        {"max_tokens", "seed"},
        {"max_completion_tokens", "seed"},
        {"max_completion_tokens"},
        {"max_completion_tokens"},
    ]


async def test_an_endpoint_that_does_not_stream_is_asked_in_one_piece() -> None:
    no_streams = (400, {"error": {"message": "stream is not supported"}})
    async with vllm_wire(no_streams, Said("hello")) as wire:
        (chunk,) = await openai(wire.url)
    assert chunk.delta.content == "hello"
    assert [body.get("stream") for body in wire.bodies] == [True, None]


async def test_a_refusal_of_something_else_is_passed_on() -> None:
    async with vllm_wire((400, {"error": {"message": "messages: bad"}})) as wire:
        with pytest.raises(EngineError, match="messages: bad"):
            await openai(wire.url)
    assert len(wire.bodies) == 1


async def test_a_wrong_key_shows_at_start() -> None:
    wrong = (401, {"error": {"message": "Incorrect API key provided"}})
    async with vllm_wire(wrong) as wire, client(OpenAIEngine(wire.url, model="gpt")) as engine:
        with pytest.raises(EngineError, match="Incorrect API key"):
            await engine.check(Mode.CHAT)


async def test_the_model_s_name_comes_from_the_settings_or_a_list_of_one(
    unlisted: str,
) -> None:
    async with client(OpenAIEngine(unlisted, model="gpt", max_context=9000)) as engine:
        info = await engine.model_info()
        assert (info.name, info.max_context) == ("gpt", 9000)
    async with client(OpenAIEngine(unlisted, model="gpt")) as engine:
        assert (await engine.model_info()).max_context == DEFAULT_CONTEXT
    async with client(OpenAIEngine(unlisted)) as engine:
        with pytest.raises(InvalidInput, match="--model"):
            await engine.model_info()
    async with vllm_wire(Said("h")) as wire, client(OpenAIEngine(wire.url)) as engine:
        info = await engine.model_info()
        assert (info.name, info.max_context) == ("small", 512)


@pytest.fixture
async def unlisted() -> AsyncIterator[str]:
    """An endpoint without /v1/models."""
    async with chat_server() as server:
        yield server.url


async def test_an_openai_engine_cannot_be_asked_for_tokens() -> None:
    async with client(OpenAIEngine("http://127.0.0.1:9", model="gpt")) as engine:
        with pytest.raises(InvalidInput, match="text only"):
            await engine.check(Mode.TOKENS)
