"""The embedded engine with the real small model: exact against transformers, usable by the OpenAI SDK."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from polar.config.settings import DEFAULT_MODEL, EngineSettings
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.embedded.weights import ensure_model

pytestmark = pytest.mark.model

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory() -> Path:
    return ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def model(directory: Path) -> SlotModel:
    return load(EngineSettings(device="cpu", slots=2, max_context=1024))


@pytest.fixture
async def client(model: SlotModel) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        EmbeddedServer(model) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk,
    ):
        yield sdk


def test_the_cached_directory_is_plain_f32_with_a_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "<|im_start|>user\n12 ünïcode\n\tdef f(): pass<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert tokenizer.token_to_id("<|im_end|>") == 2
    config = (directory / "config.json").read_text()
    assert "quantization" not in config
    assert '"float32"' in config


async def test_logprobs_match_a_forward_of_transformers(directory: Path, client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=DEFAULT_MODEL,
        prompt=list(range(1000, 1040)),
        max_tokens=24,
        seed=3,
        logprobs=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice: Any = answer.choices[0]
    plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = plain(torch.tensor([choice.prompt_token_ids + choice.token_ids])).logits[0].log_softmax(-1)
    expected = [float(rows[39 + at, id]) for at, id in enumerate(choice.token_ids)]
    assert len(expected) == 24
    assert choice.logprobs.token_logprobs == pytest.approx(expected, abs=1e-3)


async def test_the_sdk_chats_and_streams_the_same_answer(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "messages": QUESTION,
        "max_tokens": 16,
        "temperature": 0,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole: Any = await client.chat.completions.create(**asked)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    text, usage, chunk = "", None, None
    ids: list[int] = []
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
    assert text == whole.choices[0].message.content
    assert ids == whole.choices[0].token_ids
    assert usage is not None
    assert usage.completion_tokens == len(ids)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


async def test_the_sdk_streams_completions_by_token_ids(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "prompt": [1, 4093, 198], "max_tokens": 8, "seed": 1}
    extra = {"return_token_ids": True, "top_k": 5}
    whole: Any = await client.completions.create(**asked, extra_body=extra)
    stream = await client.completions.create(**asked, extra_body=extra, stream=True)
    chunks: list[Any] = [chunk async for chunk in stream]
    assert [id for chunk in chunks for id in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert chunks[0].choices[0].prompt_token_ids == [1, 4093, 198]


async def test_the_sdk_sees_errors_as_its_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        await client.completions.create(model=DEFAULT_MODEL, prompt=[5] * 2000)
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt=[5])
