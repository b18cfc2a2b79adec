"""Clients of vLLM and SGLang ask for the experts of tokens, and pass on those of exactly these tokens."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar.config.settings import EngineSettings
from polar.engines.base import EngineError, GenerateRequest, TokenChunk, WeightUpdate
from polar.engines.replicas import engine_client
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import InvalidInput
from polar.models.chat import Sampling
from polar.models.completion import Routing
from tests.fakes.routing import routing_of
from tests.fakes.sglang_wire import event as sglang_event
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.vllm_wire import event, routed_event, usage, vllm_wire
from tests.unit.engines.conftest import adapter_in

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=9, stop=("END",))
REQUEST = GenerateRequest("r1", [1, 2, 3], SAMPLING, (2,), routed_from=1)
ROWS = routing_of([1, 2, 3, 5, 6, 2], start=1)
"""Of 2, 3, 5 and 6: the last token was sampled and is not computed."""


def numbers(routing: Routing) -> str:
    """As SGLang writes them."""
    return base64.b64encode(routing.astype("<i4").tobytes()).decode()


def kept(experts: Routing, cached: int) -> list[Any]:
    """What vLLM 0.24 says when it is asked again: only in a stream how much of it was cached."""
    return [routed_event([7], [-0.1], "length", experts), usage(1, cached), "[DONE]"]


async def generated(
    engine: VllmEngine | SglangEngine, request: GenerateRequest = REQUEST
) -> list[TokenChunk]:
    try:
        return [chunk async for chunk in engine.generate(request)]
    finally:
        await engine.close()


async def test_vllm_is_asked_for_tokens_with_experts() -> None:
    answer = [routed_event([5, 6], [-0.5, -1.0]), routed_event([2], [-0.1], "stop", ROWS), usage(3), "[DONE]"]
    async with vllm_wire(answer) as wire:
        first, last = await generated(VllmEngine(wire.url, record_routing=True))
    assert (first.ids, first.logprobs, first.routing) == ([5, 6], [-0.5, -1.0], None)
    assert (last.ids, last.logprobs) == ([2], [-0.1])
    assert last.routing is not None
    assert last.routing.dtype == np.uint8
    assert last.routing.tolist() == ROWS.tolist()
    (body,) = wire.bodies
    asked = body.pop("sampling_params")
    assert body == {
        "model": "small",
        "stream": True,
        "stream_options": {"include_usage": True},
        "request_id": "r1",
        "token_ids": [1, 2, 3],
    }
    assert asked["routed_experts_prompt_start"] == 1
    assert (asked["logprobs"], asked["seed"], asked["max_tokens"]) == (1, 5, 9)
    assert (asked["stop"], asked["stop_token_ids"], asked["min_p"]) == (["END"], [2], 0.0)


@pytest.mark.parametrize(("cached", "known"), [(4, 3), (5, 4), (2, 1), (1, 0), (0, 0)])
async def test_experts_that_a_stream_lost_are_those_of_cached_tokens(cached: int, known: int) -> None:
    """vLLM 0.24 leaves them out where it sends the last tokens of a stream together."""
    lost = [routed_event([5, 6], [-0.5, -1.0]), routed_event([2], [-0.1], "stop"), usage(3), "[DONE]"]
    async with vllm_wire(lost, kept(ROWS, cached)) as wire:
        *_, last = await generated(VllmEngine(wire.url, record_routing=True))
    assert last.ids == [2]
    if known:
        assert last.routing is not None
        assert last.routing.tolist() == [*ROWS[:known].tolist(), *np.zeros_like(ROWS[known:]).tolist()]
    else:
        assert last.routing is None
    assert wire.bodies[1] == {
        "model": "small",
        "token_ids": [1, 2, 3, 5, 6],
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {"max_tokens": 1, "routed_experts_prompt_start": 1},
    }


def stream_without_experts(halfway: asyncio.Event) -> list[Any]:
    """Waits for the event after its first token, and tells no experts in the end."""
    first, rest = routed_event([5], [-0.5]), routed_event([6, 2], [-1.0, -0.1], "stop")
    return [first, halfway, rest, usage(3), "[DONE]"]


async def test_experts_of_replaced_weights_are_not_taken_from_the_cache_of_the_new() -> None:
    """When weights are replaced, vLLM computes anew what is under way: its cache is of the new ones."""
    replaced = asyncio.Event()
    lost = stream_without_experts(replaced)
    async with vllm_wire(lost, kept(ROWS[2:], cached=5)) as wire:
        engine = VllmEngine(wire.url, record_routing=True)
        engine.policy_version = 4
        chunks = engine.generate(REQUEST)
        first = await anext(chunks)
        engine.policy_version = 5
        replaced.set()
        last = [chunk async for chunk in chunks][-1]
        await engine.close()
    assert (first.policy_version, last.policy_version) == (4, 5)
    assert wire.bodies[1]["sampling_params"]["routed_experts_prompt_start"] == 3
    assert last.routing is not None
    assert last.routing.tolist() == ROWS[2:].tolist()


async def test_experts_are_not_asked_for_once_another_adapter_is_in_use(tmp_path: Path) -> None:
    replaced = asyncio.Event()
    lost = stream_without_experts(replaced)
    async with vllm_wire(lost, kept(ROWS, cached=5), takes_orders=True, takes_adapters=True) as wire:
        engine = VllmEngine(wire.url, record_routing=True)
        await engine.update_weights(WeightUpdate(4, adapter_in(tmp_path, "4")))
        chunks = engine.generate(REQUEST)
        await anext(chunks)
        await engine.update_weights(WeightUpdate(5, adapter_in(tmp_path, "5")))
        replaced.set()
        last = [chunk async for chunk in chunks][-1]
        await engine.close()
    assert (last.policy_version, last.routing) == (4, None)
    assert len(wire.bodies) == 1


async def test_experts_that_a_pause_held_back_until_other_weights_were_there_are_left_out() -> None:
    resumed = asyncio.Event()
    lost = [routed_event([5, 6, 2], [-1.0] * 3, "stop"), usage(3), "[DONE]"]
    async with vllm_wire(lost, [resumed, *kept(ROWS, cached=5)]) as wire:
        engine = VllmEngine(wire.url, record_routing=True)
        asking = asyncio.create_task(generated(engine))
        while len(wire.bodies) < 2:
            wire.arrived.clear()
            await asyncio.wait_for(wire.arrived.wait(), 30)
        engine.policy_version = 1
        resumed.set()
        (chunk,) = await asking
    assert (chunk.policy_version, chunk.routing) == (0, None)


@pytest.mark.parametrize(
    "answer", [(500, {}), (200, {"choices": []}), (200, {"choices": [{}]}), ["[DONE]"], [usage(1), "[DONE]"]]
)
async def test_an_answer_outlives_the_loss_of_its_experts(answer: Any) -> None:
    lost = [routed_event([5, 6, 2], [-1.0] * 3, "stop"), usage(3), "[DONE]"]
    async with vllm_wire(lost, answer) as wire:
        (chunk,) = await generated(VllmEngine(wire.url, record_routing=True))
    assert (chunk.ids, chunk.routing) == ([5, 6, 2], None)


async def test_sglang_is_asked_for_experts() -> None:
    told = {"routed_experts": numbers(ROWS)}
    answer = [
        sglang_event([5, 6], [-0.5, -1.0], 2),
        sglang_event([5, 6, 2], [-0.5, -1.0, -0.1], 3, "stop", **told),
    ]
    async with sglang_wire([*answer, "[DONE]"]) as wire:
        *_, last = await generated(SglangEngine(wire.url, record_routing=True))
    assert last.routing is not None
    assert last.routing.dtype == np.uint8
    assert last.routing.reshape(ROWS.shape).tolist() == ROWS.tolist()
    assert wire.bodies[0]["return_routed_experts"] is True
    assert wire.bodies[0]["routed_experts_start_len"] == 1


async def test_nobody_is_asked_who_is_not_to_record_them() -> None:
    async with vllm_wire([event([2], [-0.1], "stop"), usage(1), "[DONE]"]) as wire:
        assert [chunk.routing for chunk in await generated(VllmEngine(wire.url))] == [None]
        assert wire.bodies[0]["prompt"] == [1, 2, 3]
    async with sglang_wire([sglang_event([2], [-0.1], 1, "stop"), "[DONE]"]) as sglang:
        assert [chunk.routing for chunk in await generated(SglangEngine(sglang.url))] == [None]
        assert "return_routed_experts" not in sglang.bodies[0]


@pytest.mark.parametrize(
    "experts",
    [ROWS[1:], np.concatenate([ROWS, ROWS]), ROWS.astype(np.float32), ROWS.astype(np.int32) - 9, ROWS[:, 0]],
)
async def test_experts_of_other_tokens_are_left_out(experts: Any) -> None:
    answer = [routed_event([5, 6, 2], [-1.0] * 3, "stop", experts), usage(3), "[DONE]"]
    async with vllm_wire(answer) as wire:
        (chunk,) = await generated(VllmEngine(wire.url, record_routing=True))
    assert (chunk.ids, chunk.routing) == ([5, 6, 2], None)


async def test_experts_of_more_tokens_are_not_taken_for_more_layers() -> None:
    """SGLang says neither how many layers nor of how many tokens they are: an old one tells them of all."""
    probe = {"routed_experts": numbers(routing_of([1, 5]))}
    all_tokens = {"routed_experts": numbers(np.concatenate([ROWS, ROWS]))}
    async with sglang_wire(
        [sglang_event([5], [-0.5], 1, "stop", **probe), "[DONE]"],
        (400, {"error": {"message": "no"}}),
        [sglang_event([5, 6, 2], [-0.5, -1.0, -0.1], 3, "stop", **all_tokens), "[DONE]"],
    ) as wire:
        engine = SglangEngine(wire.url, record_routing=True)
        await engine.check()
        (chunk,) = await generated(engine)
    assert chunk.routing is None


async def test_what_sglang_computes_anew_with_other_weights_is_left_out() -> None:
    """Requests under way when weights are replaced are computed anew, the tokens sampled before included."""
    told = {"routed_experts": numbers(ROWS)}
    answer = [
        sglang_event([5], [-0.5], 1, weight_version="4"),
        sglang_event([5, 6], [-0.5, -1.0], 2, weight_version="5"),
        sglang_event([5, 6, 2], [-0.5, -1.0, -0.1], 3, "stop", weight_version="5", **told),
    ]
    async with sglang_wire([*answer, "[DONE]"]) as wire:
        engine = SglangEngine(wire.url, record_routing=True)
        engine.policy_version = 4
        *_, last = await generated(engine)
    assert last.routing is not None
    assert last.routing.reshape(-1, *ROWS.shape[1:]).tolist() == ROWS[-2:].tolist()


async def test_a_server_that_tells_no_experts_is_refused_at_start() -> None:
    async with vllm_wire([routed_event([5], [-0.5], "stop"), usage(1), "[DONE]"]) as wire:
        engine = VllmEngine(wire.url, record_routing=True)
        with pytest.raises(EngineError, match="does not tell which experts") as refused:
            await engine.check()
        await engine.close()
    assert "--enable-return-routed-experts" in (refused.value.hint or "")


def test_an_engine_without_tokens_cannot_record_them() -> None:
    with pytest.raises(InvalidInput, match="record_routing"):
        engine_client(EngineSettings(kind="openai", record_routing=True), ["http://127.0.0.1:1"])


async def test_the_experts_of_a_long_prompt_are_read_in_time_that_grows_with_them() -> None:
    """They are one line: megabytes, while every other stream of the node waits."""
    line = '{"choices": [], "said": "%s"}' % ("A" * 48_000_000)
    answer = [line, routed_event([5, 6, 2], [-1.0] * 3, "stop", ROWS), usage(3), "[DONE]"]
    async with vllm_wire(answer) as wire:
        began = time.process_time()
        (chunk,) = await generated(VllmEngine(wire.url, record_routing=True))
    assert chunk.routing is not None
    assert time.process_time() - began < 2
