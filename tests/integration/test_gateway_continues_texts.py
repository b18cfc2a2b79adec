"""Legacy completions continue a text, or its tokens, exactly: no template, nothing parsed, all recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI

from polar.models.chat import FinishReason, Message, Role
from tests.fakes.scripted_engine import Answer, Script
from tests.gateways import CALL, MODEL, Service, served

TEXT = "<|im_start|>user\nWörld 🙂<|im_end|>\n<|im_start|>assistant\n"
"""A template that is written by hand."""

Serve = Callable[..., Awaitable[tuple[Service, AsyncOpenAI]]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def service(*script: Script, **options: Any) -> tuple[Service, AsyncOpenAI]:
            made = await stack.enter_async_context(served(tmp_path, *script, **options))
            client = AsyncOpenAI(base_url=f"{made.url}/v1", api_key=made.key, max_retries=0)
            return made, await stack.enter_async_context(client)

        yield service


async def told(client: AsyncOpenAI, *, streamed: bool, **asked: Any) -> Any:
    """The first choice, put together from its chunks where it is streamed."""
    if not streamed:
        return (await client.completions.create(model=MODEL, **asked)).choices[0]
    whole: Any = None
    async for chunk in await client.completions.create(model=MODEL, stream=True, **asked):
        for choice in chunk.choices:
            if whole is None:
                whole = choice
                continue
            whole.text += choice.text
            whole.finish_reason = choice.finish_reason or whole.finish_reason
            for name in ("tokens", "token_logprobs", "text_offset") if choice.logprobs else ():
                if whole.logprobs is None:
                    whole.logprobs = choice.logprobs
                    break
                getattr(whole.logprobs, name).extend(getattr(choice.logprobs, name))
    return whole


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_text_is_continued_from_its_own_tokens(serve: Serve, streamed: bool) -> None:
    service, client = await serve("Hello, wörld 🙂.")
    choice = await told(client, streamed=streamed, prompt=TEXT, max_tokens=50)
    assert (choice.text, choice.finish_reason) == ("Hello, wörld 🙂.", "stop")
    (completion,) = await service.captured()
    assert completion.prompt_ids.tolist() == service.engine.encode(TEXT, ends=False)
    assert completion.sampled_ids.tolist() == service.engine.encode("Hello, wörld 🙂.")
    assert completion.messages == (Message(Role.USER, TEXT),)
    assert (completion.dialect, completion.untrainable) == ("openai_completions", None)


async def test_what_looks_like_a_call_stays_text(serve: Serve) -> None:
    service, client = await serve(CALL)
    choice = await told(client, streamed=False, prompt="Do", max_tokens=99)
    assert (choice.text, choice.finish_reason) == (CALL, "stop")
    (completion,) = await service.captured()
    assert not completion.response.tool_calls


async def test_tokens_that_continue_an_answer_extend_it(serve: Serve) -> None:
    service, client = await serve(Answer("One two", ends=False), "Three.")
    ids = service.engine.encode("Count: ", ends=False)
    await client.completions.create(model=MODEL, prompt=ids)
    ids += service.engine.encode("One two", ends=False) + service.engine.encode(" and", ends=False)
    await client.completions.create(model=MODEL, prompt=[ids])
    first, second = await service.captured()
    assert first.messages == (Message(Role.USER, "Count: "),)
    assert second.parent == first.id
    assert second.prompt_ids.tolist() == ids


async def test_a_text_is_no_turn_of_a_chat(serve: Serve) -> None:
    service, client = await serve("Hello.", "Again.")
    await client.completions.create(model=MODEL, prompt="Hi")
    said: Any = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    await client.chat.completions.create(model=MODEL, messages=[*said, {"role": "user", "content": "?"}])
    text, chat = await service.captured()
    assert (text.parent, chat.parent, chat.follows) == (None, None, None)
    assert chat.prompt_ids.tolist()[: len(text.prompt_ids)] != text.prompt_ids.tolist()


@pytest.mark.parametrize("streamed", [False, True])
async def test_logprobs_are_those_that_were_recorded(serve: Serve, streamed: bool) -> None:
    service, client = await serve("Hello, wörld.")
    choice = await told(client, streamed=streamed, prompt="Hi", logprobs=0, max_tokens=50)
    (completion,) = await service.captured()
    assert choice.logprobs.token_logprobs == completion.logprobs.tolist()
    assert choice.logprobs.tokens[-1] == "<|im_end|>"
    ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
    pieces = [choice.text[begin:end] for begin, end in zip(choice.logprobs.text_offset, ends, strict=True)]
    assert "".join(pieces) == choice.text
    assert pieces[0] == choice.logprobs.tokens[0] == "Hello"


async def test_an_answer_has_sixteen_tokens_where_nothing_is_said(serve: Serve) -> None:
    service, client = await serve("one two three four five six seven eight nine ten " * 3)
    choice = await told(client, streamed=False, prompt="Hi")
    assert choice.finish_reason == "length"
    (completion,) = await service.captured()
    assert (len(completion.sampled_ids), completion.finish_reason) == (16, FinishReason.LENGTH)


@pytest.mark.parametrize("streamed", [False, True])
async def test_several_answers_are_leaves_of_one_text(serve: Serve, streamed: bool) -> None:
    said = ["One.", "Two.", "Three."]
    service, client = await serve(*said)
    texts = ["", "", ""]
    if streamed:
        options: Any = {"include_usage": True}
        stream = await client.completions.create(
            model=MODEL, prompt="Hi", n=3, stream=True, stream_options=options
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage
    else:
        answer = await client.completions.create(model=MODEL, prompt="Hi", n=3)
        texts, usage = [choice.text for choice in answer.choices], answer.usage
    assert sorted(texts) == sorted(said)
    leaves = await service.captured()
    assert [leaf.parent for leaf in leaves] == [None] * 3
    assert len({leaf.prompt_ids.tobytes() for leaf in leaves}) == 1
    assert usage is not None
    assert usage.completion_tokens == sum(len(leaf.sampled_ids) for leaf in leaves)
    assert usage.prompt_tokens == len(leaves[0].prompt_ids)


async def test_a_stop_string_ends_the_text(serve: Serve) -> None:
    _, client = await serve("one two three")
    choice = await told(client, streamed=True, prompt="Hi", stop=[" thr"])
    assert (choice.text, choice.finish_reason) == ("one two", "stop")


async def test_azure_serves_completions_by_deployment(serve: Serve) -> None:
    service, _ = await serve("Hello.")
    async with AsyncAzureOpenAI(
        azure_endpoint=service.url, api_key=service.key, api_version="2024-10-21"
    ) as client:
        assert (await client.completions.create(model=MODEL, prompt="Hi")).choices[0].text == "Hello."


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"prompt": "Hi", "echo": True}, "echo"),
        ({"prompt": "Hi", "logprobs": 5}, "logprobs"),
        ({"prompt": "Hi", "suffix": "!"}, "suffix"),
        ({"prompt": "Hi", "n": 2, "best_of": 3}, "best_of"),
        ({"prompt": ["Hi", "Ho"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 10**9]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": "x " * 9000}, "prompt"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Serve, asked: dict[str, Any], at: str) -> None:
    _, client = await serve()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=MODEL, **asked)
    assert refused.value.param == at
