"""Adapters are loaded beside a server's weights, and asked for by name; tokens carry what they are of."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from polar.engines import model_server
from polar.engines.base import (
    EngineDown,
    EngineError,
    WeightUpdate,
)
from polar.engines.pausable import PausableEngine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.models.policy import PauseMode
from tests.fakes.character_chat import Said
from tests.fakes.sglang_wire import ANSWER as SGLANG_ANSWER
from tests.fakes.sglang_wire import event as sglang_event
from tests.fakes.sglang_wire import sglang_wire
from tests.fakes.vllm_wire import ANSWER, event, vllm_wire
from tests.unit.engines.conftest import adapter_in, versions


async def test_vllm_samples_with_an_adapter_by_its_name(tmp_path: Path) -> None:
    one, two, three = (adapter_in(tmp_path, name) for name in ("one", "two", "three"))
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        engine = VllmEngine(wire.url)
        for version, path in ((1, one), (2, two), (3, three)):
            await engine.update_weights(WeightUpdate(version, path))
            assert await versions(engine, "tokens") == {version}
            assert wire.bodies[-1]["model"].startswith(f"polar-{version}-")
        assert "/collective_rpc" not in wire.orders
        # Whoever has not heard of the newest yet may still ask for the one before.
        assert list(wire.adapters.values()) == [two, three]
        assert (await engine.model_info()).name == "small"
        await engine.update_weights(WeightUpdate(4))
        assert await versions(engine, "tokens") == {4}
        assert wire.bodies[-1]["model"] == "small"
        await engine.close()


async def test_an_adapter_that_another_client_had_loaded_is_found(tmp_path: Path) -> None:
    """As by another node of the same engine."""
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        first, late = VllmEngine(wire.url), VllmEngine(wire.url)
        update = WeightUpdate(5, adapter_in(tmp_path))
        await first.update_weights(update)
        await late.update_weights(update)
        ((name, _),) = wire.adapters.items()
        assert wire.orders.count(f"/v1/load_lora_adapter {name}") == 1
        assert (await late.model_info()).policy_version == 5
        assert await versions(late, "tokens") == {5}
        assert wire.bodies[-1]["model"] == name
        for one in (first, late):
            await one.close()


async def test_an_adapter_of_another_run_with_the_same_number_is_not_taken_for_it(tmp_path: Path) -> None:
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        wire.adapters["polar-1"] = "/weights/of/another/run"
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, path := adapter_in(tmp_path)))
        assert list(wire.adapters.values()) == [path]
        await engine.close()


async def test_no_two_adapters_of_any_runs_are_ever_called_the_same(tmp_path: Path) -> None:
    """vLLM finds what it has cached of a prompt by the adapter's name alone, also when that one is gone: runs
    of the same engine, which all begin with version 1, would continue each other's prompts."""
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        for run in ("one", "two", "one"):
            path = tmp_path / run
            if not path.exists():
                (Path(adapter_in(tmp_path, run)) / "adapter_model.safetensors").write_text(run)
            engine = VllmEngine(wire.url)
            await engine.update_weights(WeightUpdate(1, str(path)))
            assert await versions(engine, "tokens") == {1}
            assert list(wire.adapters.values()) == [str(path)]
            await engine.close()
    one, two, again = (body["model"] for body in wire.bodies)
    assert one == again != two


async def test_a_vllm_that_cannot_load_adapters_says_what_it_needs(tmp_path: Path) -> None:
    async with vllm_wire(ANSWER, takes_orders=True) as wire:
        engine = VllmEngine(wire.url)
        with pytest.raises(EngineError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        assert await versions(engine, "tokens") == {0}
        assert wire.bodies[-1]["model"] == "small"
        await engine.close()


async def test_an_adapter_is_not_put_on_weights_that_it_was_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        adapter = adapter_in(tmp_path)
        with pytest.raises(EngineError, match="its own were replaced"):
            await engine.update_weights(WeightUpdate(2, adapter))
        wire.refused = "/reset_prefix_cache"
        with pytest.raises(EngineError, match="reset_prefix_cache"):
            await engine.update_weights(WeightUpdate(3, str(tmp_path)))
        with pytest.raises(EngineError, match="its own were replaced"):
            await engine.update_weights(WeightUpdate(4, adapter))
        assert not wire.adapters
        await engine.close()


async def test_no_adapter_stays_in_use_on_weights_that_another_client_has_replaced(tmp_path: Path) -> None:
    """As two nodes do whose server orders all weights after an adapter."""
    (tmp_path / "model.safetensors").touch()
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        both = [VllmEngine(wire.url), VllmEngine(wire.url)]
        adapter = adapter_in(tmp_path)
        for engine in both:
            await engine.update_weights(WeightUpdate(1, adapter))
            assert await versions(engine, "tokens") == {1}
        wire.weight_version = "2+replacing-another"
        wire.named.clear()
        waiting = asyncio.create_task(both[1].update_weights(WeightUpdate(2, str(tmp_path))))
        await wire.named.wait()
        wire.weight_version = "2"
        await asyncio.wait_for(waiting, 30)
        assert "/collective_rpc" not in wire.orders
        assert await versions(both[1], "tokens") == {2}
        assert wire.bodies[-1]["model"] == "small"
        for engine in both:
            await engine.close()


async def test_a_vllm_that_lost_its_adapter_samples_as_what_it_is(tmp_path: Path) -> None:
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        await wire.start_anew()
        with suppress(EngineError):
            await versions(engine, "tokens")
        assert await versions(engine, "tokens") == {0}
        await engine.close()


async def test_what_began_with_another_adapter_is_continued_with_the_new_one(tmp_path: Path) -> None:
    gate = asyncio.Event()
    broken_off = [event([5], [-1.0]), gate]
    async with vllm_wire(broken_off, ANSWER, takes_orders=True, takes_adapters=True) as wire:
        client = VllmEngine(wire.url)
        engine = PausableEngine(client)
        asking = asyncio.create_task(versions(engine, "tokens"))
        await asyncio.wait_for(wire.arrived.wait(), 30)
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        await engine.resume()
        assert 1 in await asyncio.wait_for(asking, 30)
        assert [body["model"] for body in wire.bodies] == ["small", *wire.adapters]
        gate.set()
        await client.close()


async def test_an_adapter_that_comes_without_a_pause_leaves_none(tmp_path: Path) -> None:
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        client = VllmEngine(wire.url)
        engine = PausableEngine(client)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        assert wire.orders[-1] == "/resume"
        assert not engine.is_paused
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(WeightUpdate(2, adapter_in(tmp_path, "two")))
        assert engine.is_paused
        assert wire.orders[-1] != "/resume"
        await client.close()


async def test_a_vllm_without_names_for_weights_takes_adapters(tmp_path: Path) -> None:
    async with vllm_wire(ANSWER, takes_orders=True, takes_adapters=True) as wire:
        wire.weight_version = None
        engine = VllmEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        assert await versions(engine, "tokens") == {1}
        await engine.update_weights(WeightUpdate(2))
        assert await versions(engine, "tokens") == {2}
        assert [body["model"] for body in wire.bodies] == [*wire.adapters, "small"]
        await engine.close()


async def test_sglang_samples_with_an_adapter_by_its_name(tmp_path: Path) -> None:
    one, two, three = (adapter_in(tmp_path, name) for name in ("one", "two", "three"))
    async with sglang_wire(SGLANG_ANSWER, takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        for version, path in ((1, one), (2, two), (3, three)):
            await engine.update_weights(WeightUpdate(version, path))
            assert await versions(engine, "tokens") == {version}
            assert wire.bodies[-1]["lora_path"] == f"polar-{version}"
        assert wire.weight_version == "0+adapter-3"
        # Whoever has not heard of the newest yet may still ask for the one before.
        assert wire.adapters == {"polar-2": two, "polar-3": three}
        info = await engine.model_info()
        assert (info.name, info.policy_version) == ("small", 3)
        await engine.update_weights(WeightUpdate(4))
        assert await versions(engine, "tokens") == {4}
        assert "lora_path" not in wire.bodies[-1]
        assert "/update_weights_from_disk" not in {path for path, _ in wire.orders}
        await engine.close()


async def test_sglangs_chats_and_scores_are_of_the_adapter_too(tmp_path: Path) -> None:
    async with sglang_wire(Said("hi"), takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        assert await versions(engine, "chat") == {1}
        assert wire.bodies[-1]["lora_path"] == "polar-1"
        with suppress(EngineError):
            await engine.score([1, 2])
        assert wire.bodies[-1]["lora_path"] == "polar-1"
        await engine.close()


async def test_naming_sglangs_weights_ends_nothing_that_is_being_sampled(tmp_path: Path) -> None:
    """Unless it is told otherwise, SGLang aborts all requests."""
    async with sglang_wire(takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        named = [body for path, body in wire.orders if path == "/update_weight_version"]
        assert named == [{"new_version": "0+adapter-1", "abort_all_requests": False}]
        await engine.close()


async def test_a_client_that_connects_anew_finds_the_adapter_in_use(tmp_path: Path) -> None:
    async with sglang_wire(SGLANG_ANSWER, takes_adapters=True) as wire:
        first, late = SglangEngine(wire.url), SglangEngine(wire.url)
        update = WeightUpdate(5, adapter_in(tmp_path))
        await first.update_weights(update)
        assert (await late.model_info()).policy_version == 5
        assert await versions(late, "tokens") == {5}
        assert wire.bodies[-1]["lora_path"] == "polar-5"
        await late.update_weights(update)
        assert [path for path, _ in wire.orders].count("/load_lora_adapter") == 1
        # The weights below it are the first ones, and known to be.
        await late.update_weights(WeightUpdate(6, str(tmp_path)))
        await late.update_weights(WeightUpdate(7))
        assert wire.path == "small"
        for one in (first, late):
            await one.close()


async def test_sglang_is_given_the_weights_of_another_run_with_the_same_number(tmp_path: Path) -> None:
    one, two = adapter_in(tmp_path, "one"), adapter_in(tmp_path, "two")
    async with sglang_wire(SGLANG_ANSWER, takes_adapters=True) as wire:
        for path in (one, two, two):
            engine = SglangEngine(wire.url)
            await engine.update_weights(WeightUpdate(1, path))
            assert wire.adapters == {"polar-1": path}
            await engine.close()
        assert [path for path, _ in wire.orders].count("/load_lora_adapter") == 2
        for path in ("/weights/one", "/weights/two", "/weights/two"):
            engine = SglangEngine(wire.url)
            await engine.update_weights(WeightUpdate(1, path))
            assert wire.path == path
            await engine.close()
        assert [path for path, _ in wire.orders].count("/update_weights_from_disk") == 2


async def test_tokens_of_a_client_that_has_not_heard_of_the_adapter_carry_what_they_are_of(
    tmp_path: Path,
) -> None:
    gate = asyncio.Event()
    answer = [sglang_event([5], [-1.0], 1), gate, sglang_event([5, 2], [-1.0] * 2, 2, "stop"), "[DONE]"]
    async with sglang_wire(answer, takes_adapters=True) as wire:
        quick, slow = SglangEngine(wire.url), SglangEngine(wire.url)
        await quick.update_weights(WeightUpdate(4))
        asking = asyncio.create_task(versions(slow, "tokens"))
        await asyncio.wait_for(wire.arrived.wait(), 30)
        await quick.update_weights(WeightUpdate(5, adapter_in(tmp_path)))
        gate.set()
        assert await asyncio.wait_for(asking, 30) == {4}
        for one in (quick, slow):
            await one.close()


@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_tokens_of_an_adapter_whose_weights_below_were_replaced_are_refused(
    tmp_path: Path, mode: str
) -> None:
    async with sglang_wire(SGLANG_ANSWER if mode == "tokens" else Said("hi"), takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        assert await versions(engine, mode) == {1}
        # By another client, which this one has not heard of.
        wire.weight_version = "2"
        with pytest.raises(EngineError, match="were replaced while"):
            await versions(engine, mode)
        await engine.close()


async def test_an_adapter_goes_on_no_weights_of_sglang_that_it_was_not_trained_on(tmp_path: Path) -> None:
    async with sglang_wire(SGLANG_ANSWER, takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, str(tmp_path)))
        adapter = adapter_in(tmp_path)
        with pytest.raises(EngineError, match="its own were replaced"):
            await engine.update_weights(WeightUpdate(2, adapter))
        assert not wire.adapters
        await engine.update_weights(WeightUpdate(3))
        await engine.update_weights(WeightUpdate(4, adapter))
        assert wire.weight_version == "3+adapter-4"
        assert await versions(engine, "tokens") == {4}
        await engine.close()


async def test_an_sglang_that_cannot_load_adapters_says_what_it_needs(tmp_path: Path) -> None:
    async with sglang_wire(SGLANG_ANSWER) as wire:
        engine = SglangEngine(wire.url)
        with pytest.raises(EngineError, match=r"LoRA is not enabled.*--lora-target-modules all"):
            await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        assert wire.weight_version == "default"
        assert await versions(engine, "tokens") == {0}
        assert "lora_path" not in wire.bodies[-1]
        await engine.close()


@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_an_sglang_that_lost_its_adapter_samples_as_what_it_is(tmp_path: Path, mode: str) -> None:
    async with sglang_wire(SGLANG_ANSWER if mode == "tokens" else Said("hi"), takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, path := adapter_in(tmp_path)))
        assert await versions(engine, mode) == {1}
        await wire.start_anew()
        with suppress(EngineDown):
            await versions(engine, mode)
        assert await versions(engine, mode) == {0}
        await engine.update_weights(WeightUpdate(2, path))
        assert await versions(engine, mode) == {2}
        await engine.close()


@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_a_request_for_an_adapter_that_sglang_no_longer_has_may_succeed_elsewhere(
    tmp_path: Path, mode: str
) -> None:
    """The same connection, so nothing tells before it is refused: a replica is put aside for it."""
    async with sglang_wire(SGLANG_ANSWER if mode == "tokens" else Said("hi"), takes_adapters=True) as wire:
        engine = SglangEngine(wire.url)
        await engine.update_weights(WeightUpdate(1, path := adapter_in(tmp_path)))
        assert await versions(engine, mode) == {1}
        wire.adapters.clear()
        shutil.rmtree(path)
        wire.weight_version = "default"
        with pytest.raises(EngineDown, match="no longer samples with polar-1"):
            await versions(engine, mode)
        assert await versions(engine, mode) == {0}
        await engine.close()


async def test_an_adapter_that_others_sample_with_is_let_go_when_they_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang waits for them: in a pause, for as long as it lasts."""
    monkeypatch.setattr(model_server, "UNLOAD_SECONDS", 0.1)
    one, two, three = (adapter_in(tmp_path, name) for name in ("one", "two", "three"))
    gate = asyncio.Event()
    answer = [gate, sglang_event([5, 2], [-1.0] * 2, 2, "stop"), "[DONE]"]
    async with sglang_wire(answer, takes_adapters=True) as wire:
        late, engine = SglangEngine(wire.url), SglangEngine(wire.url)
        await late.update_weights(WeightUpdate(1, one))
        asking = asyncio.create_task(versions(late, "tokens"))
        await asyncio.wait_for(wire.arrived.wait(), 30)
        await engine.update_weights(WeightUpdate(2, two))
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(WeightUpdate(3, three))
        await engine.resume()
        gate.set()
        assert await asyncio.wait_for(asking, 30) == {1}
        async with asyncio.timeout(30), wire.updating:
            assert wire.adapters == {"polar-2": two, "polar-3": three}
        for each in (late, engine):
            await each.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_two_clients_that_load_an_adapter_at_once_both_have_it(tmp_path: Path, kind: str) -> None:
    """As two nodes of one engine do, which hear of it at the same moment."""
    wire_of = (
        sglang_wire(SGLANG_ANSWER, takes_adapters=True)
        if kind == "sglang"
        else vllm_wire(ANSWER, takes_orders=True, takes_adapters=True)
    )
    async with wire_of as wire:
        client = SglangEngine if kind == "sglang" else VllmEngine
        both = [client(wire.url), client(wire.url)]
        update = WeightUpdate(1, adapter_in(tmp_path))
        await asyncio.gather(*(engine.update_weights(update) for engine in both))
        for engine in both:
            assert await versions(engine, "tokens") == {1}
            await engine.close()


async def test_what_sglang_began_with_another_adapter_is_continued_with_the_new_one(tmp_path: Path) -> None:
    gate = asyncio.Event()
    broken_off = [sglang_event([5], [-1.0], 1), gate]
    async with sglang_wire(broken_off, SGLANG_ANSWER, takes_adapters=True) as wire:
        client = SglangEngine(wire.url)
        engine = PausableEngine(client)
        asking = asyncio.create_task(versions(engine, "tokens"))
        await asyncio.wait_for(wire.arrived.wait(), 30)
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(WeightUpdate(1, adapter_in(tmp_path)))
        await engine.resume()
        assert 1 in await asyncio.wait_for(asking, 30)
        assert [body.get("lora_path") for body in wire.bodies] == [None, "polar-1"]
        gate.set()
        await client.close()
