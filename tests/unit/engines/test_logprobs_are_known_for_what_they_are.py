"""An engine that does not say whether temperature counts in its logprobs shows it at the first check."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from polar.engines.base import EngineError
from polar.engines.replicas import Replicas
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.models.session import PROCESSED, RAW
from tests.fakes.sglang_wire import event as sglang_event
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.switchable_engine import SwitchableEngine
from tests.fakes.vllm_wire import event, usage, vllm_wire

ANSWER = [event([2], [-1.0], "stop"), usage(1), "[DONE]"]
BROAD = {"a": 3.0, "b": 1.0, "c": 0.5, "d": -1.0}
SURE = {"a": 500.0, "b": 0.0}


@pytest.mark.parametrize(
    ("logits", "counts_temperature", "mode"),
    [(BROAD, True, PROCESSED), (BROAD, False, RAW), (SURE, False, None), (None, False, None)],
    ids=["processed", "raw", "certain", "not-shown"],
)
async def test_vllm_shows_whether_temperature_counts(
    logits: Mapping[str, float] | None, counts_temperature: bool, mode: str | None
) -> None:
    async with vllm_wire(ANSWER) as wire:
        wire.logits, wire.counts_temperature = logits, counts_temperature
        engine = VllmEngine(wire.url)
        assert (await engine.model_info()).logprobs_mode is None
        await engine.check()
        assert (await engine.model_info()).logprobs_mode == mode
        await engine.close()


@pytest.mark.parametrize(
    ("logits", "counts_temperature", "named", "mode"),
    [
        (BROAD, False, PROCESSED, RAW),
        (BROAD, True, RAW, PROCESSED),
        (SURE, True, PROCESSED, PROCESSED),
        (None, False, RAW, RAW),
    ],
    ids=["shown-raw", "shown-processed", "certain", "not-shown"],
)
async def test_what_a_server_shows_is_believed_over_what_it_says(
    logits: Mapping[str, float] | None, counts_temperature: bool, named: str, mode: str
) -> None:
    async with vllm_wire(ANSWER) as wire:
        wire.logits, wire.counts_temperature, wire.named_logprobs_mode = logits, counts_temperature, named
        engine = VllmEngine(wire.url)
        assert (await engine.model_info()).logprobs_mode == named
        await engine.check()
        assert (await engine.model_info()).logprobs_mode == mode
        await engine.close()


@pytest.mark.parametrize(("counts_temperature", "mode"), [(True, PROCESSED), (False, RAW)])
async def test_sglang_shows_whether_temperature_counts(counts_temperature: bool, mode: str) -> None:
    answer = [sglang_event([2], [-1.0], 1, "stop"), "[DONE]"]
    async with sglang_wire(answer) as wire:
        wire.logits, wire.counts_temperature = list(BROAD.values()), counts_temperature
        engine = SglangEngine(wire.url)
        await engine.check()
        assert (await engine.model_info()).logprobs_mode == mode
        await engine.close()


async def test_an_engine_that_cannot_be_used_is_not_asked_further() -> None:
    async with vllm_wire([event(None, None, "stop"), "[DONE]"]) as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="without returning token ids"):
            await engine.check()
        assert len(wire.bodies) == 1
        await engine.close()


async def test_replicas_that_differ_are_not_known() -> None:
    engines = {"a": SwitchableEngine(logprobs_mode=PROCESSED), "b": SwitchableEngine(logprobs_mode=RAW)}
    replicas = Replicas(engines)
    assert (await replicas.model_info()).logprobs_mode is None
    assert (await Replicas({"a": engines["a"]}).model_info()).logprobs_mode == PROCESSED
