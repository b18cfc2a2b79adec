"""Constraints and biases go out in each engine's own words; a refusal of them is told from other trouble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polar.engines.base import Engine, EngineError, GenerateRequest, Unconstrainable
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from polar.rendering.constraints import Constraint
from tests.fakes import sglang_wire, vllm_wire

PLAIN = GenerateRequest("r1", [1, 2, 3], Sampling(temperature=1.0, max_tokens=9), (2,))
BIASED = replace(PLAIN, sampling=replace(PLAIN.sampling, logit_bias=((5, -100.0), (7, 0.5))))
SCHEMA = replace(PLAIN, constraint=Constraint(json_schema='{"type": "string"}'))
TAG = replace(PLAIN, constraint=Constraint(structural_tag='{"type": "structural_tag"}'))
FROM_VLLM = [vllm_wire.event([5], [-0.5], "stop"), vllm_wire.usage(1)]
FROM_SGLANG = [sglang_wire.event([5], [-0.5], 1, "stop")]


async def sent(engine: Engine, request: GenerateRequest) -> None:
    try:
        async for _ in engine.generate(request):
            pass
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (PLAIN, {}),
        (BIASED, {"logit_bias": {"5": -100.0, "7": 0.5}}),
        (SCHEMA, {"structured_outputs": {"json": '{"type": "string"}'}}),
        (TAG, {"structured_outputs": {"structural_tag": '{"type": "structural_tag"}'}}),
    ],
)
async def test_to_vllm(request_: GenerateRequest, fields: dict[str, Any]) -> None:
    async with vllm_wire.vllm_wire([*FROM_VLLM, "[DONE]"]) as wire:
        await sent(VllmEngine(wire.url), request_)
    body = wire.bodies[0]
    assert {name: body[name] for name in ("logit_bias", "structured_outputs") if name in body} == fields


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (PLAIN, {}),
        (BIASED, {"logit_bias": {"5": -100.0, "7": 0.5}}),
        (SCHEMA, {"json_schema": '{"type": "string"}'}),
        (TAG, {"structural_tag": '{"type": "structural_tag"}'}),
    ],
)
async def test_to_sglang(request_: GenerateRequest, fields: dict[str, Any]) -> None:
    async with sglang_wire.sglang_wire([*FROM_SGLANG, "[DONE]"]) as wire:
        await sent(SglangEngine(wire.url), request_)
    sampling = wire.bodies[0]["sampling_params"]
    names = ("logit_bias", "json_schema", "structural_tag")
    assert {name: sampling[name] for name in names if name in sampling} == fields


async def test_penalties_are_named_also_where_there_are_none() -> None:
    """A server may have others by default."""
    penalised = replace(PLAIN, sampling=replace(PLAIN.sampling, presence_penalty=0.5, frequency_penalty=-1.0))
    for request, wanted in ((PLAIN, (0.0, 0.0)), (penalised, (0.5, -1.0))):
        async with vllm_wire.vllm_wire([*FROM_VLLM, "[DONE]"]) as wire:
            await sent(VllmEngine(wire.url), request)
        async with sglang_wire.sglang_wire([*FROM_SGLANG, "[DONE]"]) as other:
            await sent(SglangEngine(other.url), request)
        for body in (wire.bodies[0], other.bodies[0]["sampling_params"]):
            assert (body["presence_penalty"], body["frequency_penalty"]) == wanted


async def test_a_refused_constraint_is_told_without_where_the_engine_is() -> None:
    async with vllm_wire.vllm_wire((400, {"error": {"message": "no such pattern"}})) as wire:
        with pytest.raises(Unconstrainable, match="no such pattern") as caught:
            await sent(VllmEngine(wire.url), SCHEMA)
        assert wire.url not in str(caught.value)
        with pytest.raises(EngineError) as other:
            await sent(VllmEngine(wire.url), PLAIN)
        assert not isinstance(other.value, Unconstrainable)


ENGINE_ERROR = {"error": {"message": "Invalid grammar: no such pattern", "code": 400}}


async def test_vllm_refuses_a_grammar_inside_its_stream() -> None:
    async with vllm_wire.vllm_wire([ENGINE_ERROR, "[DONE]"]) as wire:
        with pytest.raises(Unconstrainable, match="no such pattern"):
            await sent(VllmEngine(wire.url), SCHEMA)


async def test_sglang_refuses_a_grammar_inside_its_stream() -> None:
    async with sglang_wire.sglang_wire([ENGINE_ERROR]) as wire:
        with pytest.raises(Unconstrainable, match="no such pattern"):
            await sent(SglangEngine(wire.url), TAG)
