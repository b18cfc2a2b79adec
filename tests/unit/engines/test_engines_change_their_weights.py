"""Pauses and updates in each server's own words; several replicas change together, or drop out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from polar.engines import sglang, transfer, vllm
from polar.engines.base import (
    HALF_REPLACED,
    Engine,
    EngineDown,
    EngineError,
    Mode,
    TokenChunk,
    WeightUpdate,
)
from polar.engines.chat_wire import ChatReader
from polar.engines.openai import OpenAIEngine
from polar.engines.pausable import PausableEngine
from polar.engines.replicas import Replicas
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.models.policy import PauseMode
from tests.fakes.character_chat import Said, document
from tests.fakes.sglang_wire import ANSWER as SGLANG_ANSWER
from tests.fakes.sglang_wire import event as sglang_event
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.switchable_engine import SwitchableEngine
from tests.fakes.vllm_wire import ANSWER, event, usage, vllm_wire
from tests.unit.engines.conftest import REQUEST, versions
from tests.waiting import eventually, still_waits


async def test_sglang_is_told_in_its_own_words() -> None:
    async with sglang_wire() as wire:
        engine = SglangEngine(wire.url)
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(WeightUpdate(4, "/weights/4"))
        await engine.update_weights(WeightUpdate(4, "/weights/4"))
        await engine.resume()
        assert wire.orders == [
            ("/pause_generation", {"mode": "retract"}),
            (
                "/update_weights_from_disk",
                {"model_path": "/weights/4", "weight_version": "4", "flush_cache": True},
            ),
            ("/continue_generation", {}),
        ]
        assert (await engine.model_info()).policy_version == 4
        await engine.close()


async def test_sglang_goes_back_to_the_weights_it_serves() -> None:
    async with sglang_wire() as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(2))
        assert wire.orders[0][1]["model_path"] == "small"
        await engine.close()


async def test_sglang_goes_back_to_its_first_weights_after_it_was_given_others() -> None:
    """It calls itself by the path of the last ones by then."""
    async with sglang_wire() as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, "/weights/1"))
        assert (await engine.model_info()).name == "small"
        await engine.update_weights(WeightUpdate(2))
        assert wire.path == "small"
        await engine.update_weights(WeightUpdate(3, "/weights/3"))
        late = SglangEngine(wire.url)
        assert (await late.model_info()).name == "small"
        with pytest.raises(EngineError, match="which weights it was started with"):
            await late.update_weights(WeightUpdate(4))
        for one in (engine, late):
            await one.close()


async def test_an_sglang_replica_that_was_started_anew_comes_back_among_those_that_call_themselves_otherwise(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with sglang_wire(SGLANG_ANSWER) as one, sglang_wire(SGLANG_ANSWER) as other:
        clients = {"a": SglangEngine(one.url), "b": SglangEngine(other.url)}
        replicas = Replicas(clients, first_backoff_seconds=0.01)
        await replicas.model_info()
        await replicas.update_weights(WeightUpdate(1, "/weights/1"))
        assert (await replicas.model_info()).name == "small"
        await other.start_anew()
        other.answers = [(503, {"error": {"message": "it is loading"}})]
        assert await _versions_until(lambda: "b is put aside" in caplog.text, replicas) == {1}
        other.answers = [SGLANG_ANSWER]
        assert await _versions_until(lambda: "b is back" in caplog.text, replicas) == {1}
        assert (other.path, other.weight_version) == ("/weights/1", "1")
        await replicas.close()


async def test_a_vllm_without_names_for_weights_is_known_by_when_it_started(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        wire.weight_version, wire.started_at = None, 1794827457.67
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        assert await versions(engine, "tokens") == {1}
        await wire.start_anew()
        with suppress(EngineError):
            await versions(engine, "tokens")
        assert await versions(engine, "tokens") == {0}
        await engine.close()


@pytest.mark.parametrize("is_broken_off", [False, True], ids=["anew", "after one that was broken off"])
async def test_vllm_reads_weights_from_the_trainers_gpu(tmp_path: Path, is_broken_off: bool) -> None:
    manifest = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]], "ipc_handles_pickled": "gAS="}
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        held = transfer.publish({"update_info": manifest}, tmp_path)
        wire.is_receiving = is_broken_off
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        assert wire.transfers == [manifest]
        assert wire.weight_version == "1"
        assert not wire.is_receiving
        assert "/collective_rpc" not in wire.orders
        assert wire.orders[-2:] == ["/reset_prefix_cache", "/update_weight_version"]
        held.close()
        await engine.close()


async def test_two_clients_of_one_vllm_replace_its_weights_once(tmp_path: Path) -> None:
    """As two nodes do whose server orders the same update at the same moment."""
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        both = [VllmEngine(wire.url), VllmEngine(wire.url)]
        await asyncio.gather(*(engine.update_weights(WeightUpdate(1, str(tmp_path))) for engine in both))
        assert wire.orders.count("/collective_rpc") == 1
        for engine in both:
            assert (await engine.model_info()).policy_version == 1
            await engine.close()


async def test_weights_that_are_replaced_by_themselves_keep_their_version(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        engine, late = VllmEngine(wire.url), VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        wire.weight_version = "1+replacing-another"
        assert (await engine.model_info()).policy_version == 1
        assert (await late.model_info()).policy_version == HALF_REPLACED
        wire.weight_version = "2+replacing-another"
        assert (await engine.model_info()).policy_version == HALF_REPLACED
        for one in (engine, late):
            await one.close()


async def test_a_manifest_that_cannot_be_read_is_an_error_of_the_engine(tmp_path: Path) -> None:
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        held = transfer.publish({}, tmp_path)
        (tmp_path / transfer.MANIFEST).write_text("{")
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="cannot be read"):
            await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        held.close()
        await engine.close()


async def test_weights_that_sglang_refuses_change_no_version() -> None:
    async with sglang_wire(refuses_weights="no such directory") as wire:
        engine = SglangEngine(wire.url)
        with pytest.raises(EngineError, match="no such directory"):
            await engine.update_weights(WeightUpdate(4, "/weights/4"))
        assert engine.policy_version == 0
        await engine.close()


async def test_sglang_drains_what_was_asked_of_it() -> None:
    gate = asyncio.Event()
    answer = [sglang_event([5], [-1.0], 1), gate, sglang_event([5, 2], [-1.0] * 2, 2, "stop"), "[DONE]"]
    async with sglang_wire(answer) as wire:
        engine = SglangEngine(wire.url)
        asking = asyncio.create_task(_all(engine))
        await asyncio.wait_for(wire.arrived.wait(), 30)
        pausing = asyncio.create_task(engine.pause(PauseMode.DRAIN))
        assert await still_waits(pausing)
        gate.set()
        await asyncio.wait_for(pausing, 30)
        assert len(await asking) == 2
        await engine.close()


async def test_tokens_of_a_server_that_names_no_version_carry_that_of_the_moment_they_came() -> None:
    gate = asyncio.Event()
    answer = [event([5], [-1.0]), gate, event([6], [-1.0]), event([2], [-1.0], "stop"), usage(3), "[DONE]"]
    async with vllm_wire(answer) as wire:
        engine = VllmEngine(wire.url)
        chunks: list[TokenChunk] = []
        async for chunk in engine.generate(REQUEST):
            chunks.append(chunk)
            engine.policy_version = 1
            gate.set()
        assert [(chunk.ids, chunk.policy_version) for chunk in chunks] == [([5], 0), ([6], 1), ([2], 1)]
        await engine.close()


def test_a_whole_answer_that_spans_an_update_is_never_trained() -> None:
    """It does not say which tokens are of which weights."""
    engine = SimpleNamespace(policy_version=0)
    reader = ChatReader("http://x", lambda: engine.policy_version, ())
    engine.policy_version = 1
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    reader.read(document(Said("hello"), body | {"return_token_ids": True, "logprobs": True}))
    chunk = reader.last()
    assert chunk.delta.content == "hello"
    assert chunk.untrainable == "the weights were replaced while it was sampled, in one piece"


async def test_a_server_without_pauses_says_what_it_needs() -> None:
    async with vllm_wire() as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.pause(PauseMode.KEEP)
        await engine.resume()
        await engine.close()
    with pytest.raises(EngineError, match="cannot change its weights"):
        await OpenAIEngine("http://127.0.0.1:1").update_weights(WeightUpdate(1))


async def test_vllm_is_not_given_weights_that_are_not_there(tmp_path: Path) -> None:
    """It would not live on."""
    async with vllm_wire() as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="holds no safetensors"):
            await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        assert wire.bodies == []
        await engine.close()


async def test_vllms_weights_have_their_version_only_once_nothing_is_cached_of_the_old(
    tmp_path: Path,
) -> None:
    """Else a second attempt would find them there, and go on with what the old ones computed."""
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(takes_orders=True) as wire:
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        wire.refused = "/reset_prefix_cache"
        with pytest.raises(EngineError, match="reset_prefix_cache"):
            await engine.update_weights(WeightUpdate(2, str(tmp_path)))
        # Whichever version is wanted now, they are loaded again.
        assert (await engine.model_info()).policy_version == HALF_REPLACED
        assert (await VllmEngine(wire.url).model_info()).policy_version == HALF_REPLACED
        with pytest.raises(EngineDown, match="in the middle of a weight update"):
            await _all(engine)
        wire.refused = ""
        wire.orders.clear()
        await engine.update_weights(WeightUpdate(2, str(tmp_path)))
        assert "/reset_prefix_cache" in wire.orders
        assert (await engine.model_info()).policy_version == 2
        await engine.close()


@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_tokens_of_a_vllm_that_was_started_anew_carry_no_version_that_it_was_not_given(
    tmp_path: Path, mode: str
) -> None:
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(ANSWER if mode == "tokens" else Said("hi"), takes_orders=True) as wire:
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(3, str(tmp_path)))
        assert await versions(engine, mode) == {3}
        await wire.start_anew()
        assert await versions(engine, mode) == {0}
        await engine.update_weights(WeightUpdate(4, str(tmp_path)))
        assert await versions(engine, mode) == {4}
        await engine.close()


@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_tokens_of_an_sglang_that_was_started_anew_carry_no_version_that_it_was_not_given(
    mode: str,
) -> None:
    answer = [sglang_event([5, 2], [-1.0] * 2, 2, "stop", weight_version="default"), "[DONE]"]
    async with sglang_wire(answer if mode == "tokens" else Said("hi")) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(3, "/weights/3"))
        wire.weight_version = "default"
        assert await versions(engine, mode) == {0}
        await engine.close()


async def _versions_until(is_so: Callable[[], object], engine: Engine) -> set[int]:
    """Those of all tokens that are sampled meanwhile, for one session after the other."""
    found: set[int] = set()
    numbers = itertools.count()

    async def sampled_until_so() -> bool:
        if is_so():
            return True
        number = next(numbers)
        request = replace(REQUEST, request_id=f"r{number}", session=f"s{number}")
        found.update([chunk.policy_version async for chunk in engine.generate(request)])
        return False

    await eventually(sampled_until_so)
    return found


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("kind", [vllm, sglang])
async def test_a_pause_that_somebody_left_behind_is_ended_at_start(
    kind: ModuleType, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "PAUSE_PATIENCE_SECONDS", 0.1)
    answer = Said("h") if mode is Mode.CHAT else ANSWER if kind is vllm else SGLANG_ANSWER
    served = vllm_wire(answer, takes_orders=True) if kind is vllm else sglang_wire(answer)
    client = VllmEngine if kind is vllm else SglangEngine
    async with served as wire:
        killed, engine = client(wire.url), client(wire.url)
        await killed.pause(PauseMode.KEEP)
        await killed.close()
        await asyncio.wait_for(engine.check(mode), 30)
        assert wire.going.is_set()
        await engine.close()


def replicas() -> tuple[dict[str, SwitchableEngine], Replicas]:
    engines = {name: SwitchableEngine() for name in ("a", "b", "c")}
    return engines, Replicas(engines, first_backoff_seconds=0.01)


async def test_replicas_pause_change_and_resume_together() -> None:
    engines, group = replicas()
    await group.pause(PauseMode.KEEP)
    assert all(engine.is_paused for engine in engines.values())
    await group.update_weights(WeightUpdate(3))
    await group.resume()
    assert not any(engine.is_paused for engine in engines.values())
    assert (await group.model_info()).policy_version == 3
    await group.close()


async def test_a_replica_that_cannot_change_is_not_asked_until_it_can() -> None:
    engines, group = replicas()
    engines["b"].refuses_weights = True
    await group.update_weights(WeightUpdate(3))
    assert (await group.model_info()).policy_version == 3
    engines["b"].probed.clear()
    await asyncio.wait_for(engines["b"].probed.wait(), 30)
    others = engines["a"].sessions, engines["c"].sessions
    assert await _versions_until(lambda: sum(map(len, others)) == 30, group) == {3}
    assert engines["b"].sessions == []
    engines["b"].refuses_weights = False
    assert await _versions_until(lambda: engines["b"].sessions, group) == {3}
    await group.close()


async def test_if_no_replica_can_change_all_stay() -> None:
    engines, group = replicas()
    for engine in engines.values():
        engine.refuses_weights = True
    with pytest.raises(EngineError, match="none of the 3 engines can change its weights: a: no such weights"):
        await group.update_weights(WeightUpdate(3))
    assert (await group.model_info()).policy_version == 0
    assert [chunk.policy_version async for chunk in group.generate(REQUEST)] == [0, 0]
    await group.close()


async def test_a_replica_that_is_down_does_not_hold_up_the_others() -> None:
    engines, group = replicas()
    engines["c"].is_on = False
    await group.pause(PauseMode.KEEP)
    await group.update_weights(WeightUpdate(3))
    await group.resume()
    engines["c"].is_on = True
    await eventually(lambda: engines["c"].info.policy_version == 3)
    await group.close()


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_replica_that_comes_back_during_a_change_is_not_asked_with_the_old_weights(
    is_slow: bool,
) -> None:
    engines, group = replicas()
    engines["c"].is_on = False
    await group.pause(PauseMode.KEEP)
    engines["c"].probed.clear()
    engines["c"].checking = checking = asyncio.Event()
    loading = engines["a"].loading = engines["b"].loading = asyncio.Event()
    changing = asyncio.create_task(group.update_weights(WeightUpdate(3)))
    engines["c"].is_on = True
    await asyncio.wait_for(engines["c"].probed.wait(), 30)
    if not is_slow:
        checking.set()
        assert await _versions_until(lambda: engines["c"].sessions, group) == {0}
        engines["c"].sessions.clear()
    loading.set()
    await changing
    checking.set()
    assert await _versions_until(lambda: engines["c"].sessions, group) == {3}
    await group.close()


async def test_a_caller_that_leaves_while_it_is_broken_off_has_left() -> None:
    inner = SwitchableEngine()
    inner.gate = asyncio.Event()
    engine = PausableEngine(inner)

    async def ask() -> None:
        async for _ in engine.generate(REQUEST):
            begun.set()

    begun = asyncio.Event()
    asking = asyncio.create_task(ask())
    await asyncio.wait_for(begun.wait(), 30)
    await asyncio.sleep(0)
    pausing = asyncio.create_task(engine.pause(PauseMode.ABORT))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait({asking}, timeout=30)
    assert asking.cancelled()
    await asyncio.wait_for(pausing, 30)
    assert inner.open == 0


async def _all(engine: Engine) -> list[int]:
    return [id async for chunk in engine.generate(REQUEST) for id in chunk.ids]
