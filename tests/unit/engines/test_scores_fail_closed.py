"""What engines say of a prompt's tokens is taken only if it is there for each of them."""

from __future__ import annotations

from typing import Any

import pytest

from polar.engines.base import ContextOverflow, EngineError
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.vllm_wire import vllm_wire

IDS = [5, 6, 7]


def entry(id: int, logprob: float | None) -> dict[str, Any]:
    return {str(id): {"logprob": logprob, "rank": 3, "decoded_token": "x"}}


def vllm_answer(prompt_logprobs: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"index": 0, "text": "x", "prompt_logprobs": prompt_logprobs}]}


def sglang_answer(rows: Any) -> tuple[int, Any]:
    return 200, {"text": "x", "output_ids": [1], "meta_info": {"input_token_logprobs": rows}}


async def test_vllm_is_asked_for_the_prompts_own_tokens() -> None:
    likelier = entry(9, -0.1)
    async with vllm_wire(vllm_answer([None, entry(6, -1.5) | likelier, entry(7, -2.5)])) as wire:
        engine = VllmEngine(wire.url)
        assert await engine.score(IDS) == [0.0, -1.5, -2.5]
        await engine.close()
    (body,) = wire.bodies
    assert body["prompt"] == IDS
    assert body["prompt_logprobs"] == 0
    assert body["max_tokens"] == 1


async def test_sglang_is_asked_from_the_first_token_on() -> None:
    async with sglang_wire(sglang_answer([[None, 5, None], [-1.5, 6, None], [-2.5, 7, None]])) as wire:
        engine = SglangEngine(wire.url)
        assert await engine.score(IDS) == [0.0, -1.5, -2.5]
        await engine.close()
    (body,) = wire.bodies
    assert body["input_ids"] == IDS
    assert body["logprob_start_len"] == 0
    assert body["return_logprob"] is True


@pytest.mark.parametrize(
    "prompt_logprobs",
    [None, [], [None, entry(6, -1.5)], [None, entry(6, -1.5), entry(8, -2.5)], [None, entry(6, None), None]],
)
async def test_vllm_logprobs_that_do_not_match_the_prompt_are_refused(prompt_logprobs: Any) -> None:
    async with vllm_wire(vllm_answer(prompt_logprobs)) as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="no usable prompt_logprobs"):
            await engine.score(IDS)
        await engine.close()


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [],
        [[None, 5, None], [-1.5, 6, None]],
        [[None, 5, None], [-1.5, 6, None], [-2.5, 8, None]],
        [[None, 5, None], [None, 6, None], [-2.5, 7, None]],
    ],
)
async def test_sglang_logprobs_that_do_not_match_the_prompt_are_refused(rows: Any) -> None:
    async with sglang_wire(sglang_answer(rows)) as wire:
        engine = SglangEngine(wire.url)
        with pytest.raises(EngineError, match="no usable input_token_logprobs"):
            await engine.score(IDS)
        await engine.close()


async def test_a_prompt_that_does_not_fit_is_named_as_such() -> None:
    refusal = {"error": {"message": "This model's maximum context length is 2 tokens."}}
    async with vllm_wire((400, refusal)) as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(ContextOverflow):
            await engine.score(IDS)
        await engine.close()
