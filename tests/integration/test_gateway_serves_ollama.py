"""Ollama's official client works against the gateway, given its address and a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import ollama
import pytest
from ollama import AsyncClient

from polar.engines.base import EngineError
from polar.gateway.server import new_key
from tests.fakes.scripted_engine import Answer, Script
from tests.gateways import CALL, MODEL, SCHEMA, Service, served

ASK: list[Any] = [{"role": "user", "content": "Look around."}]
TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": SCHEMA}}
TWO_CALLS = (
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "bash", "arguments": {"command": "pwd"}}\n</tool_call>'
)

Serve = Callable[..., Awaitable[tuple[Service, AsyncClient]]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def service(*script: Script, **options: Any) -> tuple[Service, AsyncClient]:
            made = await stack.enter_async_context(served(tmp_path, *script, **options))
            client = AsyncClient(host=made.url, headers={"Authorization": f"Bearer {made.key}"})
            stack.push_async_callback(client.close)
            return made, client

        yield service


async def chatted(client: AsyncClient, *, streamed: bool, **asked: Any) -> tuple[dict[str, Any], Any]:
    """The message, put together from its lines where it is streamed, and the last line."""
    if not streamed:
        answer: Any = await client.chat(model=MODEL, **asked)
        return answer.message.model_dump(exclude_none=True), answer
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    last: Any = None
    async for last in await client.chat(model=MODEL, stream=True, **asked):
        part = last.message
        message["content"] += part.content or ""
        if part.thinking:
            message["thinking"] = message.get("thinking", "") + part.thinking
        if part.tool_calls:
            message.setdefault("tool_calls", []).extend(call.model_dump() for call in part.tool_calls)
    return message, last


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("said", [CALL, TWO_CALLS, f"Hm.\n{CALL}"], ids=["call", "calls", "thoughts"])
async def test_a_tool_loop_extends_the_sampled_tokens(serve: Serve, streamed: bool, said: str) -> None:
    service, client = await serve(said, "Seen.\nTwo files.", thinks="Hm." in said)
    messages = list(ASK)
    message, last = await chatted(client, streamed=streamed, messages=messages, tools=[TOOL])
    assert (last.done, last.done_reason) == (True, "stop")
    assert message.get("thinking") == ("Hm." if "Hm." in said else None)
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["bash"] * said.count("<tool_call>")
    assert calls[0]["function"]["arguments"]["command"] == "ls"
    messages.append(message)
    messages += [
        {"role": "tool", "tool_name": "bash", "content": f"a {index}"} for index, _ in enumerate(calls)
    ]
    await chatted(client, streamed=streamed, messages=messages, tools=[TOOL])
    first, second = await service.captured()
    before = [*first.prompt_ids.tolist(), *first.sampled_ids.tolist()]
    assert second.parent == first.id
    assert second.prompt_ids.tolist()[: len(before)] == before
    results = second.messages[-len(calls) :]
    assert [result.content for result in results] == [f"a {index}" for index in range(len(calls))]
    assert {result.name for result in results} == {"bash"}
    assert first.tools[0].parameters["required"] == ["command"]


async def test_results_without_a_name_are_those_of_the_calls_in_their_order(serve: Serve) -> None:
    service, client = await serve("Seen.")
    calls: list[Any] = [{"function": {"name": name, "arguments": {}}} for name in ("look", "list")]
    results = [{"role": "tool", "content": content} for content in ("1", "2")]
    await client.chat(model=MODEL, messages=[*ASK, {"role": "assistant", "tool_calls": calls}, *results])
    (completion,) = await service.captured()
    *_, asked, first, second = completion.messages
    assert [(result.name, result.content) for result in (first, second)] == [("look", "1"), ("list", "2")]
    assert [result.tool_call_id for result in (first, second)] == [call.id for call in asked.tool_calls]


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_end_says_what_the_answer_took(serve: Serve, streamed: bool) -> None:
    service, client = await serve("Hello, wörld 🙂.")
    message, last = await chatted(client, streamed=streamed, messages=ASK)
    assert message["content"] == "Hello, wörld 🙂."
    (completion,) = await service.captured()
    assert (last.model, last.eval_count) == (MODEL, len(completion.sampled_ids))
    assert last.prompt_eval_count == len(completion.prompt_ids)
    took = (completion.ended_at - completion.started_at) * 10**9
    assert last.total_duration == last.prompt_eval_duration + last.eval_duration
    assert last.total_duration == pytest.approx(took, abs=1000)


async def test_options_are_sampled_with(serve: Serve) -> None:
    service, client = await serve("one two three four")
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "num_predict": 3, "num_ctx": 4096}
    _, last = await chatted(client, streamed=True, messages=ASK, options=options | {"stop": ["x"]})
    assert last.done_reason == "length"
    (completion,) = await service.captured()
    used = completion.used
    assert (used.temperature, used.top_p, used.top_k, used.seed) == (0.5, 0.9, 7, 3)
    assert (used.max_tokens, used.stop) == (3, ("x",))


async def test_no_limit_is_as_much_as_there_is_room_for(serve: Serve) -> None:
    _, client = await serve("one two three four")
    _, last = await chatted(client, streamed=False, messages=ASK, options={"num_predict": -1})
    assert last.done_reason == "stop"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_single_prompt_is_a_chat_of_one_message(serve: Serve, streamed: bool) -> None:
    service, client = await serve("Hello.")
    asked: Any = {"model": MODEL, "prompt": "Hi", "system": "Be brief."}
    if streamed:
        lines = [line async for line in await client.generate(**asked, stream=True)]
        text = "".join(line.response or "" for line in lines)
    else:
        text = (await client.generate(**asked)).response or ""
    assert text == "Hello."
    await client.chat(
        model=MODEL, messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    )
    single, chat = await service.captured()
    assert single.prompt_ids.tolist() == chat.prompt_ids.tolist()


async def test_a_raw_prompt_is_continued_as_it_is(serve: Serve) -> None:
    service, client = await serve(CALL)
    text = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    answer = await client.generate(model=MODEL, prompt=text, raw=True)
    assert answer.response == CALL
    (completion,) = await service.captured()
    assert completion.prompt_ids.tolist() == service.engine.encode(text, ends=False)


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_are_those_that_were_recorded(serve: Serve, streamed: bool) -> None:
    service, client = await serve("Hello.")
    if streamed:
        lines = [line async for line in await client.chat(MODEL, ASK, stream=True, logprobs=True)]
    else:
        lines = [await client.chat(MODEL, ASK, logprobs=True)]
    told = [one.logprob for line in lines for one in line.logprobs or ()]
    (completion,) = await service.captured()
    assert told == completion.logprobs.tolist()


async def test_a_format_reaches_the_engine(serve: Serve) -> None:
    service, client = await serve('{"command": "ls"}')
    await client.chat(model=MODEL, messages=ASK, format="json")
    await client.chat(model=MODEL, messages=ASK, format=SCHEMA)
    loose, strict = service.engine.requests
    assert loose.constraint is not None
    assert strict.constraint is not None
    assert loose.constraint != strict.constraint


async def test_models_are_listed_and_shown(serve: Serve) -> None:
    _, client = await serve()
    assert [model.model for model in (await client.list()).models] == [MODEL]
    shown = await client.show(MODEL)
    assert shown.modelinfo is not None
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 8192
    with pytest.raises(ollama.ResponseError) as unknown:
        await client.show("llama9")
    assert unknown.value.status_code == 404


async def test_the_key_may_stand_in_the_host(serve: Serve) -> None:
    service, _ = await serve("Hello.")
    client = AsyncClient(host=f"{service.url}/k/{service.key}")
    assert (await client.chat(model=MODEL, messages=ASK)).message.content == "Hello."
    await client.close()  # type: ignore[no-untyped-call]


async def test_a_wait_is_bridged_by_lines_that_the_client_reads(serve: Serve) -> None:
    gate = asyncio.Event()
    _, client = await serve(Answer("One two.", gate=gate, gate_at=1), keepalive_seconds=0.01)
    seen: list[str] = []
    async for line in await client.chat(model=MODEL, messages=ASK, stream=True):
        seen.append(line.message.content or "")
        if seen.count("") == 3:
            gate.set()
    assert "".join(seen) == "One two."


async def test_refusals_are_in_ollama_s_shape(serve: Serve) -> None:
    failing = Answer("One two three", failure=EngineError("gone"), fail_at=2)
    service, client = await serve(failing)
    stranger = AsyncClient(host=service.url, headers={"Authorization": f"Bearer {new_key()}"})
    with pytest.raises(ollama.ResponseError, match="Incorrect API key") as refused:
        await stranger.chat(model=MODEL, messages=ASK)
    assert refused.value.status_code == 401
    await stranger.close()  # type: ignore[no-untyped-call]
    with pytest.raises(ollama.ResponseError, match="The model failed to answer"):
        async for _ in await client.chat(model=MODEL, messages=ASK, stream=True):
            pass


async def test_what_has_no_address_here_is_refused_in_words_too(serve: Serve) -> None:
    _, client = await serve()
    with pytest.raises(ollama.ResponseError) as refused:
        await client.embed(model=MODEL, input="Hi")
    assert (refused.value.status_code, refused.value.error) == (404, "Invalid URL (POST /api/embed)")


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "Hi", "context": [1, 2]}, "context"),
        ({"prompt": "Hi", "suffix": "!"}, "suffix"),
        ({"prompt": "Hi", "template": "{{ .Prompt }}"}, "template"),
        ({"prompt": "Hi", "top_logprobs": 3}, "top_logprobs"),
        ({"prompt": "Hi", "raw": True, "format": "json"}, "format"),
        ({"prompt": "Hi", "raw": True, "system": "Be brief."}, "system"),
        ({"prompt": "Hi", "options": {"temperature": 9}}, "options.temperature"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, asked: dict[str, Any], at: str) -> None:
    _, client = await serve()
    with pytest.raises(ollama.ResponseError, match=f"^{at}: ") as refused:
        await client.generate(model=MODEL, **asked)
    assert refused.value.status_code == 400
