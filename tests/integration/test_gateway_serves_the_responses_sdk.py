"""The official OpenAI SDK's Responses work against the gateway unchanged, and turns extend exact tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL, GatewaySettings
from polar.engines.base import EngineError
from polar.engines.embedded.weights import ensure_model
from polar.gateway.server import Gateway, SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.rendering.base import Renderer
from polar.rendering.families import renderer_for
from tests.captures import read_capture
from tests.fakes.scripted_engine import Answer, Script, ScriptedEngine
from tests.fakes.thinking_renderer import thinking_renderer

MODEL = "scripted"
FUNCTION = {
    "type": "function",
    "name": "bash",
    "description": "Execute a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
    },
}
CUSTOM = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Apply a patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
TOOLS: list[Any] = [FUNCTION, CUSTOM, {"type": "local_shell"}, {"type": "web_search"}]


def called(name: str, arguments: str, before: str = "I look.\n") -> str:
    return f'{before}<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@dataclass
class Service:
    gateway: Gateway
    engine: ScriptedEngine
    grant: SessionGrant
    client: AsyncOpenAI

    async def ask(self, streamed: bool, **fields: Any) -> Response:
        if not streamed:
            answer: Response = await self.client.responses.create(model=MODEL, **fields)
            return answer
        async with self.client.responses.stream(model=MODEL, **fields) as stream:
            return await stream.get_final_response()

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session("s1")
        return read_capture(self.grant.capture)


Serve = Callable[..., Awaitable[Service]]


@cache
def tokens(thinking: bool) -> tuple[Tokenizer, Renderer]:
    """Loaded once: they take most of a second, and no test changes them."""
    directory = ensure_model(DEFAULT_MODEL)
    file = directory / "tokenizer.json"
    renderer = (
        thinking_renderer(directory) if thinking else renderer_for(DEFAULT_MODEL, directory, tool_prompt=True)
    )
    return Tokenizer.from_file(str(file)), renderer


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def service(
            *script: Script, max_context: int = 8192, thinking: bool = False, **settings: Any
        ) -> Service:
            tokenizer, renderer = tokens(thinking)
            engine = ScriptedEngine(tokenizer, script, max_context=max_context)
            gateway = await stack.enter_async_context(
                Gateway(GatewaySettings(**settings), engine, renderer, engine.info)
            )
            grant = SessionGrant("s1", new_key(), tmp_path / "capture", SamplingPin(), Budgets())
            gateway.open_session(grant)
            client = AsyncOpenAI(
                base_url=f"http://{gateway.host}:{gateway.port}/v1", api_key=grant.key, max_retries=0
            )
            await stack.enter_async_context(client)
            return Service(gateway, engine, grant, client)

        yield service


async def test_a_plain_response(serve: Serve) -> None:
    service = await serve("Hello.")
    response = await service.client.responses.create(model=MODEL, input="Hi", instructions="Be kind.")
    assert (response.status, response.output_text) == ("completed", "Hello.")
    assert response.instructions == "Be kind."
    assert response.usage is not None
    assert response.usage.output_tokens == len(service.engine.encode("Hello."))
    (completion,) = await service.captured()
    assert [message.content for message in completion.messages] == ["Be kind.", "Hi"]
    assert response.id.startswith(f"resp_{completion.id}")


async def test_a_streamed_response_arrives_in_pieces_and_in_order(serve: Serve) -> None:
    service = await serve("Hello, wörld 🙂.")
    events = [
        event async for event in await service.client.responses.create(model=MODEL, input="Hi", stream=True)
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 2
    assert "".join(deltas) == "Hello, wörld 🙂."
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == "Hello, wörld 🙂."


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize(
    ("script", "item", "output"),
    [
        (called("bash", '{"command":  "ls"}'), {"type": "function_call", "name": "bash",
         "arguments": '{"command":  "ls"}'}, "function_call_output"),
        (called("apply_patch", '{"input": "*** Begin\\n+a \\"b\\""}'), {"type": "custom_tool_call",
         "name": "apply_patch", "input": '*** Begin\n+a "b"'}, "custom_tool_call_output"),
        (called("apply_patch", '{"patch": "x"}'), {"type": "custom_tool_call",
         "name": "apply_patch", "input": '{"patch": "x"}'}, "custom_tool_call_output"),
        (called("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}', before=""),
         {"type": "local_shell_call"}, "local_shell_call_output"),
        (called("local_shell", '{"command": "ls -l"}'), {"type": "function_call",
         "name": "local_shell", "arguments": '{"command": "ls -l"}'}, "function_call_output"),
    ],
)  # fmt: skip
async def test_a_tool_loop_extends_the_sampled_tokens_exactly(
    serve: Serve, streamed: bool, by_id: bool, script: str, item: dict[str, Any], output: str
) -> None:
    service = await serve(script, "Two files.", "Bye.")
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    fixed: dict[str, Any] = {"tools": TOOLS, "instructions": "Use tools."}
    first = await service.ask(streamed, input=history, **fixed)
    call: Any = first.output[-1]
    assert call.model_dump(include=set(item)) == item
    result = {"type": output, "call_id": call.call_id, "output": "a\nb"}
    if output == "local_shell_call_output":
        result["id"] = result.pop("call_id")
    if by_id:
        second = await service.ask(streamed, input=[result], previous_response_id=first.id, **fixed)
        await service.ask(streamed, input="Thanks", previous_response_id=second.id, **fixed)
    else:
        history += [*(item.to_dict() for item in first.output), result]
        second = await service.ask(streamed, input=history, **fixed)
        history += [*second.output, {"role": "user", "content": "Thanks"}]
        await service.ask(streamed, input=history, **fixed)
    assert second.output_text == "Two files."
    turns = await service.captured()
    assert [turn.parent for turn in turns] == [None, turns[0].id, turns[1].id]
    for before, after in pairwise(turns):
        seen = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        assert after.prompt_ids.tolist()[: len(seen)] == seen
    assert [message.role for message in turns[2].messages] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert turns[1].messages[-1].tool_call_id == turns[1].messages[2].tool_calls[0].id


@pytest.mark.parametrize("streamed", [False, True])
async def test_parallel_calls_are_one_turn(serve: Serve, streamed: bool) -> None:
    script = called("bash", '{"command": "a"}') + "\n" + called("bash", '{"command": "b"}', before="")
    service = await serve(script, "Done.")
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    first = await service.ask(streamed, input=history, tools=TOOLS)
    assert [item.type for item in first.output] == ["message", "function_call", "function_call"]
    history += first.output
    history += [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in first.output
        if item.type == "function_call"
    ]
    await service.ask(streamed, input=history, tools=TOOLS)
    turns = await service.captured()
    assert turns[1].parent == turns[0].id
    assert [message.role for message in turns[1].messages] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_instructions_are_not_carried_over_to_a_continuation(serve: Serve, streamed: bool) -> None:
    service = await serve("One.", "Two.", "Three.", "Four.", "Five.")
    previous: str | None = None
    for number, instructions in enumerate(["Old.", "Old.", "New.", None, "New."]):
        asked = {"instructions": instructions, "previous_response_id": previous}
        given = {name: value for name, value in asked.items() if value is not None}
        previous = (await service.ask(streamed, input=str(number), **given)).id
    turns = await service.captured()
    seen = [[message.content for message in turn.messages] for turn in turns]
    said = ["0", "One.", "1", "Two.", "2", "Three.", "3", "Four.", "4"]
    assert seen == [
        ["Old.", *said[:1]],
        ["Old.", *said[:3]],
        ["New.", *said[:5]],
        said[:7],
        ["New.", *said],
    ]
    assert [turn.parent for turn in turns] == [None, turns[0].id, None, None, turns[2].id]


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("streamed", [False, True])
async def test_sealed_reasoning_comes_back_as_it_was_sampled(
    serve: Serve, streamed: bool, summary: Any
) -> None:
    service = await serve("Hm, so.\nHello.", "Bye.", "Bye.", thinking=True)
    asked: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "reasoning": {"effort": "low", "summary": summary},
    }
    history: list[Any] = [{"role": "user", "content": "Hi"}]
    first = await service.ask(streamed, input=history, **asked)
    assert [item.type for item in first.output] == ["reasoning", "message"]
    assert first.output_text == "Hello."
    sealed = first.output[0].to_dict() | {"summary": [], "content": None}
    history += [sealed, first.output[1].to_dict(), {"role": "user", "content": "And?"}]
    await service.ask(streamed, input=history, **asked)
    await service.ask(streamed, input=history, tools=[FUNCTION], **asked)
    turns = await service.captured()
    assert turns[1].parent == turns[0].id
    assert turns[2].parent is None
    assert turns[2].messages[1].reasoning == turns[0].response.reasoning == "Hm, so."


async def test_input_tokens_are_counted_and_not_recorded(serve: Serve) -> None:
    service = await serve("Hello.")
    counted = await service.client.responses.input_tokens.count(model=MODEL, input="Hi")
    response = await service.ask(False, input="Hi")
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens
    assert len(await service.captured()) == 1


async def test_an_answer_cut_by_length_is_incomplete(serve: Serve) -> None:
    service = await serve("one two three four five", "one two three four five")
    whole = await service.ask(False, input="Hi", max_output_tokens=2)
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = [
        event
        async for event in await service.client.responses.create(
            model=MODEL, input="Hello", max_output_tokens=2, stream=True
        )
    ]
    assert events[-1].type == "response.incomplete"


class Weather(BaseModel):
    city: str
    degrees: int


@pytest.mark.parametrize("streamed", [False, True])
async def test_structured_output_is_parsed(serve: Serve, streamed: bool) -> None:
    service = await serve('{"city": "Oslo", "degrees": 3}')
    if streamed:
        async with service.client.responses.stream(model=MODEL, input="Hi", text_format=Weather) as stream:
            parsed = (await stream.get_final_response()).output_parsed
    else:
        parsed = (
            await service.client.responses.parse(model=MODEL, input="Hi", text_format=Weather)
        ).output_parsed
    assert parsed == Weather(city="Oslo", degrees=3)


async def test_refusals_are_the_sdks_own_errors(serve: Serve) -> None:
    service = await serve(EngineError("CUDA"), max_context=64)
    with pytest.raises(openai.AuthenticationError) as unknown:
        await service.client.with_options(api_key="no").responses.create(model=MODEL, input="Hi")
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError):
        await service.client.responses.create(model="other", input="Hi")
    with pytest.raises(openai.BadRequestError) as malformed:
        await service.client.responses.create(model=MODEL, input=[{"type": "item_reference", "id": "msg_1"}])
    assert malformed.value.param == "input[0].id"
    with pytest.raises(openai.BadRequestError):
        await service.client.responses.create(model=MODEL, input="Hi", previous_response_id="resp_unknown")
    with pytest.raises(openai.BadRequestError) as overflow:
        await service.client.responses.create(model=MODEL, input="word " * 100)
    assert (overflow.value.code, overflow.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.InternalServerError):
        await service.client.responses.create(model=MODEL, input="Hi")


async def test_an_engine_that_fails_in_a_stream_fails_the_response(serve: Serve) -> None:
    service = await serve(Answer("one two three", failure=EngineError("CUDA"), fail_at=2))
    events = [
        event async for event in await service.client.responses.create(model=MODEL, input="Hi", stream=True)
    ]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert "CUDA" not in last.response.error.message


async def test_a_waiting_stream_is_kept_alive_by_events(serve: Serve) -> None:
    gate = asyncio.Event()
    service = await serve(Answer("Hello.", gate=gate), keepalive_seconds=0.05)
    progress = 0
    async for event in await service.client.responses.create(model=MODEL, input="Hi", stream=True):
        progress += event.type == "response.in_progress"
        if progress == 3:
            gate.set()
    assert event.type == "response.completed"
    assert progress >= 3


@pytest.mark.parametrize("at", ["/v1", "/openai/v1", "/openai"])
async def test_the_websocket_probe_is_told_to_use_http(serve: Serve, at: str) -> None:
    service = await serve()
    url = f"http://{service.gateway.host}:{service.gateway.port}{at}/responses"
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as response:
        assert response.status == 426
        assert (await response.json())["error"]["code"] == "websocket_not_supported"


async def test_a_streamed_prompt_that_does_not_fit_fails_inside_its_stream(serve: Serve) -> None:
    service = await serve(max_context=64)
    stream = await service.client.responses.create(model=MODEL, input="word " * 100, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error is not None
    assert str(error.code) == "context_length_exceeded"  # not among the codes that the SDK lists
    assert not await service.captured()
