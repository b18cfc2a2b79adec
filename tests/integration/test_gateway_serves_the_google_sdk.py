"""The official Google SDK works against the gateway unchanged, and its errors are of its own classes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from google import genai
from google.genai import errors, types
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.base import EngineError
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from tests.captures import read_capture
from tests.fakes.scripted_engine import Answer, Script, ScriptedEngine
from tests.fakes.thinking_renderer import thinking_renderer

MODEL = "scripted"
CALL = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
TWO_CALLS = (
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>'
)
BASH = types.FunctionDeclaration(
    name="bash",
    description="Execute a command.",
    parameters=types.Schema(
        type=types.Type.OBJECT,
        properties={"command": types.Schema(type=types.Type.STRING)},
        required=["command"],
    ),
)
WITH_BASH = types.GenerateContentConfig(
    system_instruction="You are an agent.",
    tools=[types.Tool(function_declarations=[BASH])],
    automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
)


@dataclass
class Service:
    gateway: Gateway
    engine: ScriptedEngine
    grant: SessionGrant
    blocking: genai.Client

    @property
    def client(self) -> genai.client.AsyncClient:
        return self.blocking.aio

    @property
    def url(self) -> str:
        return f"http://{self.gateway.host}:{self.gateway.port}"

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session("s1")
        return read_capture(self.grant.capture)


Serve = Callable[..., Awaitable[Service]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    directory = ensure_model(DEFAULT_MODEL)
    async with AsyncExitStack() as stack:

        async def service(
            *script: Script,
            name: str = MODEL,
            max_context: int = 8192,
            thinks: bool = False,
            **settings: Any,
        ) -> Service:
            engine = ScriptedEngine(
                Tokenizer.from_file(str(directory / "tokenizer.json")),
                script,
                name=name,
                max_context=max_context,
            )
            renderer = (
                thinking_renderer(directory)
                if thinks
                else renderer_for(DEFAULT_MODEL, directory, tool_prompt=True)
            )
            gateway = await stack.enter_async_context(
                Gateway(GatewaySettings(**settings), engine, renderer, engine.info)
            )
            grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
            gateway.open_session(grant)
            options = types.HttpOptions(base_url=f"http://{gateway.host}:{gateway.port}")
            client = genai.Client(api_key=grant.key, http_options=options)
            stack.push_async_callback(client.aio.aclose)
            stack.callback(client.close)
            return Service(gateway, engine, grant, client)

        yield service


async def test_a_plain_generation(serve: Serve) -> None:
    service = await serve("Hello.")
    answer = await service.client.models.generate_content(model=MODEL, contents="Hi")
    assert answer.text == "Hello."
    assert answer.candidates is not None
    assert answer.candidates[0].finish_reason is types.FinishReason.STOP
    assert (answer.model_version, bool(answer.response_id)) == (MODEL, True)
    usage = answer.usage_metadata
    assert usage is not None
    assert usage.candidates_token_count == len(service.engine.encode("Hello."))
    assert usage.total_token_count == (usage.prompt_token_count or 0) + (usage.candidates_token_count or 0)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_streamed_generation(serve: Serve, blocking: bool) -> None:
    said = "Hello,\u2028 wörld 🙂\x85."  # with characters that the blocking client takes for line ends
    service = await serve(said)
    if blocking:
        models = service.blocking.models
        chunks = await asyncio.to_thread(
            lambda: list(models.generate_content_stream(model=MODEL, contents="Hi"))
        )
    else:
        stream = await service.client.models.generate_content_stream(model=MODEL, contents="Hi")
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.text or "" for chunk in chunks) == said
    assert len([chunk for chunk in chunks if chunk.text]) > 2
    assert chunks[-1].candidates is not None
    assert chunks[-1].candidates[0].finish_reason is types.FinishReason.STOP
    assert chunks[-1].usage_metadata is not None


async def test_an_answer_cut_by_its_limit_says_so(serve: Serve) -> None:
    service = await serve("one two three four five")
    answer = await service.client.models.generate_content(
        model=MODEL, contents="Hi", config=types.GenerateContentConfig(max_output_tokens=2, top_k=5)
    )
    assert answer.candidates is not None
    assert answer.candidates[0].finish_reason is types.FinishReason.MAX_TOKENS
    (made,) = await service.captured()
    assert (made.used.max_tokens, made.used.top_k) == (2, 5)


async def _generate(
    service: Service,
    contents: list[types.Content],
    *,
    streamed: bool,
    config: types.GenerateContentConfig = WITH_BASH,
) -> list[types.GenerateContentResponse]:
    models = service.client.models
    if not streamed:
        return [await models.generate_content(model=MODEL, contents=contents, config=config)]
    stream = await models.generate_content_stream(model=MODEL, contents=contents, config=config)
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("said", [CALL, TWO_CALLS])
async def test_a_tool_loop_extends_the_sampled_tokens_exactly(
    serve: Serve, streamed: bool, said: str
) -> None:
    service = await serve(said, "Two files.")
    contents: list[types.Content] = [types.UserContent("Look around.")]
    answers = await _generate(service, contents, streamed=streamed)
    calls = [call for answer in answers for call in answer.function_calls or []]
    assert [call.name for call in calls] == ["bash"] * said.count("<tool_call>")
    assert calls[0].args is not None
    assert calls[0].args["command"] == "ls"
    said_contents = [
        candidate.content for answer in answers for candidate in answer.candidates or [] if candidate.content
    ]
    assert any(part.thought_signature for content in said_contents for part in content.parts or [])
    results = [
        types.Part(
            function_response=types.FunctionResponse(
                id=call.id, name=call.name, response={"output": f"a {index}"}
            )
        )
        for index, call in enumerate(calls)
    ]
    contents += [*said_contents, types.Content(role="user", parts=results)]
    assert (await _generate(service, contents, streamed=streamed))[0].text is not None
    first, second = await service.captured()
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.parent == first.id
    assert second.prompt_ids.tolist()[: len(before)] == before
    assert len(second.prompt_ids) > len(before)
    answered = second.messages[-len(calls) :]
    assert [message.content for message in answered] == [f"a {index}" for index in range(len(calls))]
    assert [message.tool_call_id for message in answered] == [call.id for call in first.response.tool_calls]
    assert first.tools[0].parameters == {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    }


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_drops_thoughts_and_ids_continues_the_conversation(
    serve: Serve, streamed: bool
) -> None:
    service = await serve(f"Hm, what now?\n{CALL}", "Seen.\nTwo files.", thinks=True)
    config = WITH_BASH.model_copy(update={"thinking_config": types.ThinkingConfig(include_thoughts=True)})
    contents: list[types.Content] = [types.UserContent("Look around.")]
    answers = await _generate(service, contents, streamed=streamed, config=config)
    parts = [part for answer in answers for part in answer.parts or []]
    assert "".join(part.text or "" for part in parts if part.thought) == "Hm, what now?"
    assert "".join(part.text or "" for part in parts if not part.thought) == "I look."
    kept = [part for part in parts if not part.thought]
    for part in kept:
        if part.function_call:
            part.function_call.id = None
    result = types.Part.from_function_response(name="bash", response={"result": "a\nb"})
    contents += [types.ModelContent(kept), types.UserContent([result])]
    (*_, last) = await _generate(service, contents, streamed=streamed, config=WITH_BASH)
    assert not any(part.thought for part in last.parts or [])
    first, second = await service.captured()
    assert second.parent == first.id
    assert second.messages[-1].tool_call_id == first.response.tool_calls[0].id


@pytest.mark.parametrize("role", ["tool", "function"])
async def test_results_may_come_in_a_role_of_their_own(serve: Serve, role: str) -> None:
    service = await serve(CALL, "Two files.")
    asked = types.UserContent("Look around.")
    (answer,) = await _generate(service, [asked], streamed=False)
    assert answer.candidates is not None
    said = answer.candidates[0].content
    assert said is not None
    result = types.Part.from_function_response(name="bash", response={"result": "a\nb"})
    (answer,) = await _generate(
        service, [asked, said, types.Content(role=role, parts=[result])], streamed=False
    )
    assert answer.text == "Two files."
    first, second = await service.captured()
    assert second.parent == first.id
    assert (second.messages[-1].role, second.messages[-1].content) == ("tool", "a\nb")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_chat_of_the_sdk_stays_one_conversation(serve: Serve, streamed: bool) -> None:
    service = await serve("One.", " Two. ", "Three.")
    chat = service.client.chats.create(model=MODEL)
    for ask in ("a", "b", "c"):
        if streamed:
            async for _ in await chat.send_message_stream(ask):
                pass
        else:
            await chat.send_message(ask)
    first, second, third = await service.captured()
    assert (second.parent, third.parent) == (first.id, second.id)


async def test_a_stream_with_keep_alives_is_read_whole_by_gemini_cli(serve: Serve) -> None:
    gate = asyncio.Event()
    service = await serve(Answer("One two.", gate=gate, gate_at=1), keepalive_seconds=0.01)
    url = f"{service.url}/v1beta/models/{MODEL}:streamGenerateContent?alt=sse"
    body = {"contents": [{"role": "user", "parts": [{"text": "a"}]}]}
    async with (
        aiohttp.ClientSession(headers={"x-goog-api-key": service.grant.key}) as http,
        http.post(url, json=body) as response,
    ):
        raw = await response.content.readuntil(b"}\n\ndata:  ")  # an event and two keep-alives after it
        gate.set()
        raw += await response.read()
    buffer, texts = raw.decode(), []
    while event := re.match(r"data: (.*)(?:\n\n|\r\r|\r\n\r\n)", buffer):  # how Gemini CLI reads
        texts.append(json.loads(event[1])["candidates"][0]["content"]["parts"][0]["text"])
        buffer = buffer[event.end() :]
    assert (buffer, "".join(texts)) == ("", "One two.")


async def test_functions_are_called_automatically(serve: Serve) -> None:
    def bash(command: str) -> str:
        """Execute a command."""
        return f"ran {command}"

    service = await serve(CALL, "Done.")
    answer = await service.client.models.generate_content(
        model=MODEL, contents="Go", config=types.GenerateContentConfig(tools=[bash])
    )
    assert answer.text == "Done."
    first, second = await service.captured()
    assert second.parent == first.id
    assert second.messages[-1].content == "ran ls"


async def test_tokens_are_counted_as_they_are_prompted_and_nothing_is_recorded(serve: Serve) -> None:
    service = await serve("Hello.")
    counted = await service.client.models.count_tokens(model=MODEL, contents="How long is this?")
    answer = await service.client.models.generate_content(model=MODEL, contents="How long is this?")
    assert answer.usage_metadata is not None
    assert counted.total_tokens == answer.usage_metadata.prompt_token_count
    assert len(await service.captured()) == 1


async def test_models_are_listed_and_shown(serve: Serve) -> None:
    service = await serve(name="Qwen/Qwen3-4B")
    assert [model.name async for model in await service.client.models.list()] == ["models/Qwen/Qwen3-4B"]
    shown = await service.client.models.get(model="Qwen/Qwen3-4B")
    assert (shown.name, shown.input_token_limit) == ("models/Qwen/Qwen3-4B", 8192)
    with pytest.raises(errors.ClientError) as caught:
        await service.client.models.get(model="other")
    assert (caught.value.code, caught.value.status) == (404, "NOT_FOUND")


async def test_a_model_name_with_a_slash_is_served(serve: Serve) -> None:
    service = await serve("Hi.", "Ho.", name="Qwen/Qwen3-4B")
    for name in ("Qwen/Qwen3-4B", "models/Qwen/Qwen3-4B"):
        assert (await service.client.models.generate_content(model=name, contents="Hi")).text


async def test_refusals_are_client_errors_with_googles_status(serve: Serve) -> None:
    service = await serve(max_context=300)
    models = service.client.models
    wrong = types.HttpOptions(headers={"x-goog-api-key": "polar-wrong"})
    with pytest.raises(errors.ClientError) as unknown_key:
        await models.generate_content(
            model=MODEL, contents="Hi", config=types.GenerateContentConfig(http_options=wrong)
        )
    with pytest.raises(errors.ClientError) as unknown_model:
        await models.generate_content(model="other", contents="Hi")
    with pytest.raises(errors.ClientError) as malformed:
        await models.generate_content(
            model=MODEL, contents="Hi", config=types.GenerateContentConfig(temperature=5)
        )
    with pytest.raises(errors.ClientError) as overflow:
        await models.generate_content(model=MODEL, contents="word " * 400)
    told = [caught.value for caught in (unknown_key, unknown_model, malformed, overflow)]
    assert [(error.code, error.status) for error in told] == [
        (401, "UNAUTHENTICATED"),
        (404, "NOT_FOUND"),
        (400, "INVALID_ARGUMENT"),
        (400, "INVALID_ARGUMENT"),
    ]
    assert "generationConfig.temperature" in (malformed.value.message or "")
    assert (overflow.value.message or "").startswith("The input token count (")
    assert (overflow.value.message or "").endswith(") exceeds the maximum number of tokens allowed (300).")
    await service.gateway.close_session("s1")
    with pytest.raises(errors.ClientError) as ended:
        await models.generate_content(model=MODEL, contents="Hi")
    assert ended.value.code == 410


async def test_engine_trouble_is_a_server_error_also_in_the_middle_of_a_stream(serve: Serve) -> None:
    failing = Answer("Hello there, you.", failure=EngineError("CUDA"), fail_at=2)
    service = await serve(EngineError("CUDA"), failing)
    with pytest.raises(errors.ServerError) as caught:
        await service.client.models.generate_content(model=MODEL, contents="Hi")
    assert (caught.value.code, caught.value.status) == (500, "INTERNAL")
    with pytest.raises(errors.ServerError) as caught:
        async for _ in await service.client.models.generate_content_stream(model=MODEL, contents="Ho"):
            pass
    assert (caught.value.code, caught.value.status) == (500, "INTERNAL")
    assert "CUDA" not in str(caught.value)


async def test_a_stream_without_alt_sse_is_a_json_array(serve: Serve) -> None:
    failing = Answer("Hello there.", failure=EngineError("CUDA"), fail_at=1)
    service = await serve("Hello there.", failing, keepalive_seconds=0.05)
    url = f"{service.url}/v1/models/{MODEL}:streamGenerateContent?key={service.grant.key}"
    bodies = []
    async with aiohttp.ClientSession() as http:
        for text in ("a", "b"):
            body = {"contents": {"parts": {"text": text}}}
            async with http.post(url, json=body) as response:
                assert (response.status, response.content_type) == (200, "application/json")
                bodies.append(json.loads(await response.text()))
    parts = [chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in bodies[0]]
    assert "".join(parts) == "Hello there."
    assert bodies[0][-1]["candidates"][0]["finishReason"] == "STOP"
    assert bodies[1][-1]["error"]["status"] == "INTERNAL"


async def test_models_at_the_shared_address_are_in_the_askers_words(serve: Serve) -> None:
    service = await serve()
    async with aiohttp.ClientSession() as http:
        google = {"x-goog-api-key": service.grant.key}
        async with http.get(f"{service.url}/v1/models", headers=google) as response:
            assert "models" in await response.json()
        openai = {"Authorization": f"Bearer {service.grant.key}"}
        async with http.get(f"{service.url}/v1/models", headers=openai) as response:
            assert "data" in await response.json()
        for headers, name in ((google, "name"), (openai, "id")):
            async with http.get(f"{service.url}/v1/models/{MODEL}", headers=headers) as response:
                assert MODEL in (await response.json())[name]
        async with http.get(f"{service.url}/v1beta/nothing", headers=google) as response:
            assert response.status == 404
            assert (await response.json())["error"]["status"] == "NOT_FOUND"


async def test_equal_requests_at_once_are_one_sample_each(serve: Serve) -> None:
    said = ["One.", "Two.", "Three.", "Four."]
    service = await serve(*said)
    asked = [service.client.models.generate_content(model=MODEL, contents="Hi") for _ in said]
    assert sorted(answer.text or "" for answer in await asyncio.gather(*asked)) == sorted(said)
    assert len(await service.captured()) == len(said)


async def test_several_candidates_are_sampled(serve: Serve) -> None:
    said = ["One.", CALL, "Three."]
    service = await serve(*said)
    config = types.GenerateContentConfig(candidate_count=3, tools=WITH_BASH.tools)
    answer = await service.client.models.generate_content(model=MODEL, contents="Hi", config=config)
    assert [candidate.index for candidate in answer.candidates or ()] == [0, 1, 2]
    told = [candidate.content for candidate in answer.candidates or ()]
    texts = [(content.parts or [])[0].text or "" for content in told if content]
    assert {text.strip() for text in texts} == {"One.", "I look.", "Three."}
    assert len(await service.captured()) == 3
