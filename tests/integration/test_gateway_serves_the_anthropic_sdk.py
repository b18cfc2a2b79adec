"""The official Anthropic SDK works against the gateway unchanged, and its errors are of its own classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import AsyncAnthropic
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.base import EngineDown, EngineError
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.families import renderer_for
from tests.captures import read_capture
from tests.fakes.scripted_engine import Answer, Script, ScriptedEngine
from tests.fakes.thinking_renderer import thinking_renderer

MODEL = "scripted"
ASK: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {
        "name": "bash",
        "description": "Execute a command.",
        "input_schema": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    }
]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l", "seconds": 1.0}}\n</tool_call>'


@dataclass
class Service:
    gateway: Gateway
    engine: ScriptedEngine
    grant: SessionGrant
    client: AsyncAnthropic

    @property
    def url(self) -> str:
        return f"http://{self.gateway.host}:{self.gateway.port}"

    async def ask(self, *, streamed: bool = False, **fields: Any) -> anthropic.types.Message:
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "messages": ASK} | fields
        if not streamed:
            answer: anthropic.types.Message = await self.client.messages.create(**body)
            return answer
        async with self.client.messages.stream(**body) as stream:
            return await stream.get_final_message()

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


Serve = Callable[..., Awaitable[Service]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    model = ensure_model(DEFAULT_MODEL)
    async with AsyncExitStack() as stack:

        async def service(
            *script: Script,
            budgets: Budgets | None = None,
            max_context: int = 8192,
            thinks: bool = False,
            **settings: object,
        ) -> Service:
            tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
            engine = ScriptedEngine(tokenizer, script, max_context=max_context)
            renderer = thinking_renderer(model) if thinks else renderer_for("x", model, tool_prompt=True)
            gateway = Gateway(GatewaySettings(**settings), engine, renderer, engine.info)
            await stack.enter_async_context(gateway)
            grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), budgets or Budgets())
            gateway.open_session(grant)
            url = f"http://{gateway.host}:{gateway.port}"
            client = AsyncAnthropic(base_url=url, api_key=grant.key, max_retries=0)
            await stack.enter_async_context(client)
            return Service(gateway, engine, grant, client)

        yield service


def echoed(message: anthropic.types.Message) -> dict[str, Any]:
    content = [block.model_dump(exclude={"parsed_output"}, exclude_none=True) for block in message.content]
    return {"role": "assistant", "content": content}


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def assert_extends(second: Completion, first: Completion) -> None:
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.parent == first.id
    assert second.prompt_ids.tolist()[: len(before)] == before
    assert len(second.prompt_ids) > len(before)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_message(serve: Serve, streamed: bool) -> None:
    service = await serve("Hello, wörld 🙂.")
    message = await service.ask(streamed=streamed, system="Be kind.")
    assert [block.model_dump(exclude_none=True) for block in message.content] == [
        {"type": "text", "text": "Hello, wörld 🙂."}
    ]
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    (made,) = await service.captured()
    assert message.id == f"msg_{made.id}"
    assert message.usage.output_tokens == len(made.sampled_ids)
    assert message.usage.input_tokens == len(made.prompt_ids)
    assert message.usage.cache_read_input_tokens == 0


async def test_text_flows_as_it_is_sampled(serve: Serve) -> None:
    gate = asyncio.Event()
    service = await serve(Answer("One two three four.", gate=gate, gate_at=3))
    async with service.client.messages.stream(model=MODEL, max_tokens=50, messages=ASK) as stream:
        texts = stream.text_stream
        first = await anext(texts)
        assert not gate.is_set()
        gate.set()
        rest = [text async for text in texts]
    assert first + "".join(rest) == "One two three four."
    assert len(rest) > 2


@pytest.mark.parametrize("text", ["", "I look.\n"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_loop_extends_the_sampled_tokens_exactly(
    serve: Serve, streamed: bool, text: str
) -> None:
    service = await serve(text + CALL, "Two files.\n" + CALL + "\n" + CALL, "Done.")
    first = await service.ask(streamed=streamed, tools=TOOLS)
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == (["text"] if text else []) + ["tool_use"]
    call = first.content[-1]
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("bash", {"command": "ls -l", "seconds": 1.0})
    history = [*ASK, echoed(first), {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": "a\nb"}]}]  # fmt: skip
    second = await service.ask(streamed=streamed, tools=TOOLS, messages=history)
    calls = [block for block in second.content if block.type == "tool_use"]
    assert len({call.id for call in calls}) == 2
    results: list[dict[str, Any]] = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": f"r{index}"}]}
        for index, call in enumerate(calls)
    ]
    history += [
        echoed(second),
        {"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]},
    ]
    third = await service.ask(streamed=streamed, tools=TOOLS, messages=history)
    assert third.stop_reason == "end_turn"
    one, two, three = await service.captured()
    assert_extends(two, one)
    assert_extends(three, two)
    assert [(message.role.value, message.content) for message in three.messages[-3:]] == [
        ("tool", "r0"),
        ("tool", "r1"),
        ("user", "Go on."),
    ]


@pytest.mark.parametrize("streamed", [False, True])
async def test_thinking_comes_signed_and_its_echo_extends_exactly(serve: Serve, streamed: bool) -> None:
    service = await serve("Which files?\nI look.\n" + CALL, "Done.", "Again.", thinks=True)
    first = await service.ask(
        streamed=streamed, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048
    )
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    thought, call = first.content[0], first.content[2]
    assert thought.type == "thinking"
    assert call.type == "tool_use"
    assert thought.thinking == "Which files?"
    assert thought.signature
    result = {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": call.id, "content": "a", "is_error": True}]}  # fmt: skip
    await service.ask(tools=TOOLS, messages=[*ASK, echoed(first), result])
    without_thought = {"role": "assistant", "content": echoed(first)["content"][1:]}
    await service.ask(tools=TOOLS, messages=[*ASK, without_thought, result])
    one, two, three = await service.captured()
    assert one.response.reasoning == "Which files?"
    assert_extends(two, one)
    assert_extends(three, one)
    assert two.messages[-1].content == "Error: a"


async def test_a_history_that_claude_code_reshapes_is_known_again(serve: Serve) -> None:
    service = await serve("I look.\n" + CALL, "Done.")
    cached = {"cache_control": {"type": "ephemeral"}}
    reminder = "You are in /w."
    first = await service.ask(
        tools=TOOLS,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: v=1; h=abc"},
            {"type": "text", "text": "Be good."} | cached,
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi"} | cached]},
            {"role": "system", "content": [{"type": "text", "text": reminder} | cached]},
        ],
        extra_headers={"anthropic-beta": "context-management-2025-06-27,made-up-2031-01-01"},
        extra_query={"beta": "true"},
        extra_body={"context_management": {"edits": []}, "output_config": {"effort": "high"}},
    )
    call = first.content[1]
    assert call.type == "tool_use"
    await service.ask(
        tools=[TOOLS[0] | cached],
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: v=1; h=def"},
            {"type": "text", "text": "Be good."},
        ],
        messages=[
            *ASK,
            {"role": "system", "content": reminder},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}]},
            {"role": "assistant", "content": [call.model_dump(exclude_none=True) | cached]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "a"} | cached]},
        ],
    )  # fmt: skip
    one, two = await service.captured()
    assert_extends(two, one)


@pytest.mark.parametrize("streamed", [False, True])
async def test_max_tokens_and_stop_sequences_are_told_apart(serve: Serve, streamed: bool) -> None:
    service = await serve("One two three four.", "One two END three.")
    cut = await service.ask(streamed=streamed, max_tokens=2)
    assert cut.stop_reason == "max_tokens"
    stopped = await service.ask(streamed=streamed, stop_sequences=["STOP", "END"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "One two "


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_turn_ended_after_one_call_ends_with_no_stop_sequence(serve: Serve, streamed: bool) -> None:
    service = await serve("I call nothing.\n</tool_call>\nOr do I?")
    one = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await service.ask(streamed=streamed, tools=TOOLS, tool_choice=one, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_is_begun_goes_on_in_an_open_turn(serve: Serve, streamed: bool) -> None:
    service = await serve("Hi.", ' "Oslo"}', "Bye.")
    first = await service.ask(streamed=streamed)
    begun = [*ASK, echoed(first), {"role": "user", "content": "Where?"}]
    said = await service.ask(
        streamed=streamed, messages=[*begun, {"role": "assistant", "content": '{"city":'}]
    )
    assert text_of(said) == ' "Oslo"}'
    whole = {"role": "assistant", "content": '{"city":' + text_of(said)}
    await service.ask(streamed=streamed, messages=[*begun, whole, {"role": "user", "content": "Thanks"}])
    opened, middle, last = await service.captured()
    assert_extends(middle, opened)
    assert_extends(last, middle)
    prompt = service.engine.tokenizer.decode(middle.prompt_ids.tolist(), skip_special_tokens=False)
    assert prompt.endswith('Where?<|im_end|>\n<|im_start|>assistant\n{"city":')
    assert middle.response.content == ' "Oslo"}'


async def test_an_answer_that_was_cut_short_goes_on_where_it_was(serve: Serve) -> None:
    service = await serve(Answer("One two", ends=False), " three.", " Four.")
    first = await service.ask()
    second = await service.ask(messages=[*ASK, echoed(first)])
    assert text_of(second) == " three."
    text = text_of(first) + text_of(second)
    await service.ask(messages=[*ASK, {"role": "assistant", "content": text}])
    cut, went_on, anew = await service.captured()
    assert went_on.parent == cut.id
    assert went_on.prompt_ids.tolist() == [*cut.prompt_ids.tolist(), *cut.sampled_ids.tolist()]
    assert anew.parent is None, "an answer that had ended is no longer open: its text is rendered anew"
    prompt = service.engine.tokenizer.decode(anew.prompt_ids.tolist(), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nOne two three.")


async def test_what_cannot_be_begun_is_refused_by_name(serve: Serve) -> None:
    service = await serve("Hi.")
    call = {"type": "tool_use", "id": "t", "name": "bash", "input": {}}
    refused: list[tuple[Any, dict[str, Any]]] = [
        ([call], {}),
        ([{"type": "thinking", "thinking": "hm", "signature": "s"}], {}),
        ("{", {"tools": TOOLS, "tool_choice": {"type": "any"}}),
    ]
    for last, more in refused:
        with pytest.raises(anthropic.BadRequestError, match="end with"):
            await service.ask(messages=[*ASK, {"role": "assistant", "content": last}], **more)
    assert service.engine.requests == []
    ending: Any = [*ASK, {"role": "assistant", "content": [call]}]
    counted = await service.client.messages.count_tokens(model=MODEL, messages=ending)
    assert counted.input_tokens > 0, "any turn may be counted"


async def test_tokens_are_counted_truly_and_not_recorded(serve: Serve) -> None:
    service = await serve("Hello.")
    body: dict[str, Any] = {"model": MODEL, "messages": ASK, "system": "Be kind.", "tools": TOOLS}
    counted = await service.client.messages.count_tokens(**body)
    message = await service.client.messages.create(max_tokens=50, **body)
    assert counted.input_tokens == message.usage.input_tokens
    assert len(await service.captured()) == 1


async def test_models_are_listed_and_shown(serve: Serve) -> None:
    service = await serve()
    models = [model async for model in service.client.models.list()]
    assert [(model.id, model.max_input_tokens) for model in models] == [(MODEL, 8192)]
    assert await service.client.models.retrieve(MODEL) == models[0]


async def test_the_key_may_be_a_bearer_token(serve: Serve) -> None:
    service = await serve("Hello.")
    async with AsyncAnthropic(base_url=service.url, auth_token=service.grant.key, max_retries=0) as client:
        message = await client.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    assert message.stop_reason == "end_turn"


async def test_mistakes_are_of_the_sdks_own_classes(serve: Serve) -> None:
    service = await serve(max_body_bytes=4096)
    with pytest.raises(anthropic.NotFoundError) as missing:
        await service.ask(model="other")
    assert missing.value.type == "not_found_error"
    assert missing.value.request_id is not None
    with pytest.raises(anthropic.NotFoundError):
        await service.client.models.retrieve("other")
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].role") as bad:
        await service.ask(messages=[{"role": "robot", "content": "x"}])
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(anthropic.APIStatusError) as large:
        await service.ask(messages=[{"role": "user", "content": "x" * 5000}])
    assert (large.value.status_code, large.value.type) == (413, "request_too_large")
    service.client.api_key = "polar-wrong"
    for ask in (service.ask, service.client.models.list):
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await ask()
        assert unknown.value.type == "authentication_error"


async def test_an_overflowing_prompt_says_so_in_the_words_harnesses_look_for(serve: Serve) -> None:
    service = await serve(max_context=64)
    words = "word " * 100
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 1\d\d tokens > 64 maximum"):
        await service.ask(messages=[{"role": "user", "content": words}])


async def test_a_spent_budget_and_an_ended_session_are_not_tried_again(serve: Serve) -> None:
    service = await serve("Hello.", budgets=Budgets(max_completions=1))
    patient = service.client.with_options(max_retries=5)
    await patient.messages.create(model=MODEL, max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.APIStatusError) as spent:
        await patient.messages.create(model=MODEL, max_tokens=6, messages=ASK)
    assert (spent.value.status_code, spent.value.type) == (402, "billing_error")
    assert spent.value.request.headers["x-stainless-retry-count"] == "0"
    await service.captured()
    with pytest.raises(anthropic.APIStatusError) as ended:
        await patient.messages.create(model=MODEL, max_tokens=5, messages=ASK)
    assert ended.value.status_code == 410
    assert ended.value.request.headers["x-stainless-retry-count"] == "0"


async def test_engine_trouble_is_told_without_its_details(serve: Serve) -> None:
    late = Answer("One two three.", failure=EngineError("CUDA"), fail_at=2)
    service = await serve(EngineDown("http://inside:1 refused"), EngineError("CUDA"), late)
    for status, type_ in ((529, "overloaded_error"), (500, "api_error")):
        with pytest.raises(anthropic.InternalServerError) as caught:
            await service.ask()
        assert (caught.value.status_code, caught.value.type) == (status, type_)
        assert "inside" not in str(caught.value)
        assert "CUDA" not in str(caught.value)
    with pytest.raises(anthropic.APIStatusError, match="failed to answer") as broken:
        await service.ask(streamed=True)
    assert broken.value.type == "api_error"


async def test_a_waiting_stream_is_kept_alive_with_pings(serve: Serve) -> None:
    gate = asyncio.Event()
    service = await serve(Answer("Hello.", gate=gate), keepalive_seconds=0.01)
    body = {"model": MODEL, "max_tokens": 5, "messages": ASK, "stream": True}
    headers = {"x-api-key": service.grant.key}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{service.url}/v1/messages?beta=true", json=body, headers=headers) as response,
    ):
        assert response.content_type == "text/event-stream"
        while (await response.content.readline()) != b"event: ping\n":
            pass
        assert await response.content.readline() == b'data: {"type":"ping"}\n'
        gate.set()
        assert (await response.content.read()).endswith(
            b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
        )


async def test_probes_and_unknown_addresses_are_answered_in_anthropics_words(serve: Serve) -> None:
    service = await serve()
    async with aiohttp.ClientSession(headers={"anthropic-version": "2023-06-01"}) as http:
        for method in ("HEAD", "GET"):
            async with http.request(method, f"{service.url}/api/hello") as response:
                assert response.status == 200
        async with http.get(f"{service.url}/v1/nothing") as response:
            assert response.status == 404
            body = await response.json()
            assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
            assert body["request_id"] == response.headers["request-id"]
