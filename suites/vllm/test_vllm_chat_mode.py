"""Chat mode against a real vLLM server: its own template, its own ids and logprobs, streams and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, BadRequestError
from transformers import AutoModelForCausalLM

from polar.app.stack import data_plane
from polar.config.settings import DEFAULT_MODEL, EngineSettings, Settings
from polar.engines.base import ChatCall
from polar.engines.embedded.weights import ensure_model
from polar.engines.vllm import VllmEngine
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.models.chat import ChatRequest, Message, Role
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from suites.vllm_metrics import metric
from tests.captures import read_capture
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)

LS: Any = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "List a directory.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"enum": ["/tmp"]}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Scene:
    gateway: Gateway
    grant: SessionGrant
    client: AsyncOpenAI

    async def said(
        self, messages: list[Any], *, stream: bool = False, **asked: Any
    ) -> tuple[str, list[str | None]]:
        """The text, and the names of the tools that are called, however they come."""
        body: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 24} | asked
        if stream:
            chunks = await self.client.chat.completions.create(**body, stream=True)
            parts = [chunk.choices[0].delta async for chunk in chunks if chunk.choices]
        else:
            parts = [(await self.client.chat.completions.create(**body)).choices[0].message]
        calls = [call for part in parts for call in part.tool_calls or ()]
        return "".join(part.content or "" for part in parts), [call.function.name for call in calls]

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


OpenScene = Callable[[str], Awaitable[Scene]]


@pytest.fixture
async def open_scene(vllm_url: str, tmp_path: Path) -> AsyncIterator[OpenScene]:
    engine = EngineSettings(url=vllm_url, mode="chat")
    async with AsyncExitStack() as stack:
        settings = Settings(data_dir=tmp_path, engine=engine)
        plane = await stack.enter_async_context(data_plane(settings, lambda _step: None))

        async def scene(name: str = "s") -> Scene:
            pin = SamplingPin(temperature=0.8, seed=7)
            grant = SessionGrant(name, new_key(), tmp_path / name, pin, Budgets())
            plane.gateway.open_session(grant)
            client = await stack.enter_async_context(
                AsyncOpenAI(base_url=f"{plane.gateway.url}/v1", api_key=grant.key, max_retries=0)
            )
            return Scene(plane.gateway, grant, client)

        yield scene


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_chat_s_ids_and_logprobs_are_those_of_the_model(open_scene: OpenScene) -> None:
    scene = await open_scene("s")
    messages: list[Any] = [user("Name three colours.")]
    for _ in range(2):
        text, _ = await scene.said(messages)
        messages += [{"role": "assistant", "content": text}, user("And two more.")]
    first, second = await scene.captured()
    assert (first.untrainable, second.untrainable) == (None, None)
    assert second.follows == first.id
    model = AutoModelForCausalLM.from_pretrained(ensure_model(DEFAULT_MODEL), dtype=torch.float32).eval()
    for completion in (first, second):
        ids = torch.tensor([[*completion.prompt_ids.tolist(), *completion.sampled_ids.tolist()]])
        with torch.inference_mode():
            rows = (model(ids).logits[0] / 0.8).log_softmax(-1)[len(completion.prompt_ids) - 1 : -1]
        expected = rows.gather(1, torch.tensor(completion.sampled_ids.tolist())[:, None])[:, 0].numpy()
        assert np.abs(expected - completion.logprobs).max() <= 1e-3


async def test_a_chat_samples_the_same_streamed_or_whole(open_scene: OpenScene) -> None:
    runs = []
    for stream in (False, True):
        scene = await open_scene(f"s{stream}")
        text, _ = await scene.said([user("Tell me a story.")], stream=stream)
        (completion,) = await scene.captured()
        assert completion.untrainable is None
        runs.append((text, completion.prompt_ids.tolist(), completion.sampled_ids.tolist()))
        logprobs = completion.logprobs
    assert runs[0] == runs[1]
    assert len(runs[0][2]) == len(logprobs) == 24


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_s_forced_tool_call_has_all_its_tokens(open_scene: OpenScene, stream: bool) -> None:
    scene = await open_scene("s")
    asked = {"tools": [LS], "tool_choice": "required", "max_tokens": 64}
    _, called = await scene.said([user("What is in /tmp?")], stream=stream, **asked)
    (completion,) = await scene.captured()
    assert called == ["ls"]
    assert completion.untrainable is None
    assert completion.extra["constraint"] == "tool_choice"
    assert len(completion.sampled_ids) == len(completion.logprobs) > 0


async def test_a_chat_whose_client_leaves_ends_in_vllm(open_scene: OpenScene, vllm_url: str) -> None:
    for stream in (False, True):
        scene = await open_scene(f"s{stream}")
        asked = [user("Count to ten thousand.")]
        call = asyncio.create_task(scene.said(asked, stream=stream, max_tokens=3000, stop=["no such text"]))
        await until(vllm_url, 1)
        call.cancel()
        await asyncio.wait({call})
        await until(vllm_url, 0)
        (completion,) = await scene.captured()
        assert completion.finish_reason == "cancelled"


async def test_a_chat_that_does_not_fit_is_an_overflow_with_its_length(open_scene: OpenScene) -> None:
    scene = await open_scene("s")
    with pytest.raises(BadRequestError, match=r"maximum context length is 4096.*resulted in \d+") as refused:
        await scene.said([user("word " * 5000)])
    assert refused.value.code == "context_length_exceeded"
    # A limit that runs over the context is no reason to refuse a prompt that fits.
    assert await scene.said([user("Say hi.")], max_tokens=4090, stop=["!", "."]) is not None


async def test_vllm_counts_a_chat_as_it_renders_it(open_scene: OpenScene, vllm_url: str) -> None:
    scene = await open_scene("s")
    await scene.said([user("Name three colours.")], max_tokens=2)
    (completion,) = await scene.captured()
    engine = VllmEngine(vllm_url)
    try:
        chat = ChatRequest(DEFAULT_MODEL, (Message(Role.USER, "Name three colours."),))
        assert await engine.count_tokens(chat) == len(completion.prompt_ids)
        chunks = [chunk async for chunk in engine.chat(ChatCall("check-1", chat, chat.sampling))]
        assert chunks[-1].untrainable is None
    finally:
        await engine.close()


async def until(url: str, running: int) -> None:
    """Return once vLLM has so many requests at work."""

    async def is_so() -> bool:
        return await metric(url, "num_requests_running") == running

    await eventually(is_so, every=0.1)
