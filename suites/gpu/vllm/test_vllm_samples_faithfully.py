"""A real vLLM on a GPU behind the gateway in tokens mode: exact ids, true logprobs, streams, aborts."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import BadRequestError
from pydantic import BaseModel
from tokenizers import Tokenizer

from benchmarks.training.faithfulness import compare
from polar.training.settings import ModelSettings
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import row
from polar.trajectory.prefix_merging import PrefixMerging
from suites.vllm_metrics import is_idle, metric
from tests.captures import grow
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

QUESTIONS = (
    "Write a Python function that reverses a linked list.",
    "Explain what a mutex is to a child.",
    "What is the capital of Australia, and why not Sydney?",
    "Write a shell command that counts the lines of all Python files below a directory.",
    "Tell a short story about a lighthouse.",
    "Translate to German: the bridge is closed until Monday.",
    "List the first ten prime numbers and say what a prime is.",
    "Write an SQL query for the three best-paid employees of each department.",
)
BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
        },
    },
}
REQUESTS = (
    "List the files in the current directory.",
    "Which files are in the current directory? Call the bash tool.",
    "Run ls and tell me what is there.",
)
LARGEST_MEAN = {("float32", "float32"): 1e-3}
"""Mean |Δ logprob| by the dtype of the server and the precision of the trainer; 0.05 in bfloat16."""


class Weather(BaseModel):
    city: Literal["Rome", "Oslo"]
    is_sunny: bool


async def converse(scene: Any, question: str, *, max_tokens: int = 128) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for follow_up in ("Say it in other words.", ""):
        answer = await scene.client.chat.completions.create(
            model=scene.model, messages=messages, max_tokens=max_tokens
        )
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content or ""},
            {"role": "user", "content": follow_up},
        ]


async def test_logprobs_are_those_of_the_trainer(
    opened: Any, model_directory: Path, dtype: str, record: Any
) -> None:
    async with opened(temperature=1.0, seed=7) as scene:
        await asyncio.gather(*(converse(scene, question) for question in QUESTIONS))
        completions = await scene.captured()
    assert len(completions) == 2 * len(QUESTIONS)
    by_id = {completion.id: completion for completion in completions}
    for completion in completions:
        assert len(completion.sampled_ids) == len(completion.logprobs) > 0
        if completion.parent is not None:
            before = by_id[completion.parent]
            seen = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
            assert completion.prompt_ids.tolist()[: len(seen)] == seen
    assert sum(completion.parent is not None for completion in completions) == len(QUESTIONS)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions))
    rows = [row(str(at), materialise(trajectory, ref)) for at, ref in enumerate(trajectory.traces)]
    assert len(rows) == len(QUESTIONS)
    means = {}
    for precision in ("float32", "bfloat16"):
        found = compare(rows, ModelSettings(name=str(model_directory)), precision, 4096, 1.0)
        means[precision] = found.mean
        figures = {"tokens": found.tokens, "mean": found.mean, "p99": found.p99, "max": found.max}
        record(f"logprobs, server {dtype}, trainer {precision}", figures | {"mean |ratio - 1|": found.ratio})
    for precision, mean in means.items():
        assert mean <= LARGEST_MEAN.get((dtype, precision), 0.05)


async def test_a_tool_call_goes_through_in_tokens(opened: Any, model_directory: Path, record: Any) -> None:
    async with opened(temperature=0.0) as scene:
        asked = {"model": scene.model, "tools": [BASH], "max_tokens": 128}
        for request in REQUESTS:
            messages: list[Any] = [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": request},
            ]
            first = (await scene.client.chat.completions.create(messages=messages, **asked)).choices[0]
            record(f"tool call: {request}", first.message.model_dump(mode="json", exclude_none=True))
            if first.message.tool_calls:
                break
        else:
            # Small coder models often write calls in other forms; held to the template's, they call.
            must = {"tool_choice": "required", "parallel_tool_calls": False}
            first = (await scene.client.chat.completions.create(messages=messages, **asked, **must)).choices[
                0
            ]
            record("tool call, required", first.message.model_dump(mode="json", exclude_none=True))
        (call,) = first.message.tool_calls or []
        assert call.function.name == "bash"
        assert json.loads(call.function.arguments)["command"]
        turn = first.message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "lighthouse.py\nREADME.md"}
        answer = await scene.client.chat.completions.create(messages=[*messages, turn, result], **asked)
        record("answer to its result", answer.choices[0].message.model_dump(mode="json", exclude_none=True))
        *_, one, two = await scene.captured()
    assert two.parent == one.id
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(model_directory)
    shown = reference.apply_chat_template(messages, tools=[BASH], add_generation_prompt=True)["input_ids"]
    assert one.prompt_ids.tolist() == list(shown)


async def test_a_stream_holds_what_is_captured(opened: Any, model_directory: Path, record: Any) -> None:
    async with opened(temperature=1.0, seed=3) as scene:
        pieces, times = [], [time.perf_counter()]
        stream = await scene.client.chat.completions.create(
            model=scene.model,
            messages=[{"role": "user", "content": QUESTIONS[0]}],
            max_tokens=100,
            stream=True,
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
                times.append(time.perf_counter())
        (completion,) = await scene.captured()
    gaps = sorted(later - sooner for sooner, later in pairwise(times[1:]))
    record(
        "stream",
        {
            "pieces": len(pieces),
            "tokens": len(completion.sampled_ids),
            "first piece after ms": 1000 * (times[1] - times[0]),
            "median gap ms": 1000 * gaps[len(gaps) // 2],
        },
    )
    assert len(pieces) >= len(completion.sampled_ids) // 4
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    assert "".join(pieces).strip() == tokenizer.decode(completion.sampled_ids.tolist()).strip()


async def test_a_client_that_leaves_ends_the_generation(opened: Any, vllm_url: str, record: Any) -> None:
    async with opened(temperature=1.0) as scene:
        stream = await scene.client.chat.completions.create(
            model=scene.model,
            messages=[{"role": "user", "content": "Count from one to ten thousand, in words."}],
            max_tokens=4000,
            stream=True,
            extra_body={"stop": ["no such text"]},
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        assert await metric(vllm_url, "num_requests_running") == 1
        left = time.perf_counter()
        await stream.close()
        await eventually(partial(is_idle, vllm_url), 30)
        record("abort", {"running for seconds after the client left": time.perf_counter() - left})
        (completion,) = await scene.captured()
    assert completion.finish_reason == "cancelled"
    assert 0 < len(completion.sampled_ids) < 4000


async def test_turns_find_their_prefix_in_the_cache(opened: Any, vllm_url: str, record: Any) -> None:
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    hits, queries = [await metric(vllm_url, name) for name in names]
    async with opened(temperature=1.0) as scene:
        messages: list[Any] = [
            {"role": "user", "content": f"Remember at {time.time()}: " + "apple pear " * 300}
        ]
        for _ in range(5):
            answer = await scene.client.chat.completions.create(
                model=scene.model, messages=messages, max_tokens=64
            )
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or ""},
                {"role": "user", "content": "Go on."},
            ]
        completions = await scene.captured()
    hits, queries = [
        await metric(vllm_url, name) - before for name, before in zip(names, (hits, queries), strict=True)
    ]
    prompts = [len(completion.prompt_ids) for completion in completions]
    # Everything that an earlier turn computed, but for the block that each turn ends in.
    possible = sum(prompts[:-1])
    record("prefix cache", {"prompts": prompts, "hits": hits, "queries": queries, "possible": possible})
    assert hits >= possible - 16 * len(prompts)


async def test_constraints_hold(opened: Any) -> None:
    ask: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    async with opened(temperature=1.0, seed=7, max_tokens=100) as scene:
        answer = await scene.client.chat.completions.parse(
            model=scene.model, messages=ask, response_format=Weather
        )
        assert isinstance(answer.choices[0].message.parsed, Weather)
        forced = await scene.client.chat.completions.create(
            model=scene.model,
            messages=ask,
            tools=[BASH],
            tool_choice={"type": "function", "function": {"name": "bash"}},
            parallel_tool_calls=False,
        )
        (call,) = forced.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments).keys() == {"command"}
        free = await scene.client.chat.completions.create(
            model=scene.model, messages=ask, tools=[BASH], tool_choice="none", max_tokens=40
        )
        assert not free.choices[0].message.tool_calls
        schema = {"type": "string", "pattern": "(?<=a)b("}
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        with pytest.raises(BadRequestError, match="cannot be held"):
            await scene.client.chat.completions.create(
                model=scene.model, messages=ask, response_format=wanted
            )
