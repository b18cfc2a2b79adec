"""Weights are replaced between two tokens, whole or not at all, and each token names those it came from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from polar.config.settings import EngineSettings
from polar.engines.base import EngineError, GenerateRequest, TokenChunk, WeightUpdate
from polar.engines.embedded.model import SlotModel, load, read_weights
from polar.engines.embedded.scheduler import Chunks, Generation, Sampled, Scheduler
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.pausable import PausableEngine
from polar.engines.vllm import VllmEngine
from polar.models.chat import Sampling
from polar.models.policy import PauseMode
from tests.fakes.tiny_llama import write_tiny_llama
from tests.waiting import still_waits

PROMPT = list(range(20, 60))
Logprobs = Callable[[list[int], list[int]], list[float]]


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """The tiny model with other weights."""
    directory = tmp_path_factory.mktemp("other")
    torch.manual_seed(7)
    tensors = load_file(tiny_directory / "model.safetensors")
    save_file(
        {name: t + 0.05 * torch.randn_like(t) for name, t in tensors.items()}, directory / "m.safetensors"
    )
    return directory


@pytest.fixture(scope="session")
def other_logprobs(tiny_directory: Path, other: Path) -> Logprobs:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()
    model.load_state_dict(load_file(other / "m.safetensors"), strict=False)

    def logprobs(prompt: list[int], sampled: list[int]) -> list[float]:
        with torch.inference_mode():
            rows = model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)
        return [float(rows[len(prompt) + at - 1, id]) for at, id in enumerate(sampled)]

    return logprobs


@pytest.fixture
async def client(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    # Which tokens are sampled depends on when the weights change: none of them may end the completion.
    monkeypatch.setattr(server.model, "eos_token_ids", frozenset())
    client = VllmEngine(server.url)
    await client.model_info()
    yield client
    await client.close()


@pytest.fixture
def engine(client: VllmEngine) -> PausableEngine:
    return PausableEngine(client)


def asked(tokens: int, prompt: list[int] = PROMPT) -> GenerateRequest:
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=5, max_tokens=tokens)
    return GenerateRequest(uuid4().hex, prompt, sampling)


async def sampled(engine: PausableEngine, request: GenerateRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def joined(chunks: list[TokenChunk]) -> tuple[list[int], list[float], list[int]]:
    ids = [id for chunk in chunks for id in chunk.ids]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    return ids, logprobs, [chunk.policy_version for chunk in chunks for _ in chunk.ids]


async def spanning(engine: PausableEngine, mode: PauseMode, update: WeightUpdate, tokens: int = 120) -> Any:
    """A completion during which the weights are replaced."""
    chunks: list[TokenChunk] = []
    begun = asyncio.Event()

    async def generate() -> None:
        async for chunk in engine.generate(asked(tokens)):
            chunks.append(chunk)
            if sum(len(chunk.ids) for chunk in chunks) >= 5:
                begun.set()

    generation = asyncio.create_task(generate())
    async with asyncio.timeout(30):
        await begun.wait()
        await engine.pause(mode)
        await engine.update_weights(update)
        await engine.resume()
        await generation
    return joined(chunks)


def split(versions: list[int]) -> int:
    """Where the version changes, which it does once."""
    at = versions.index(1)
    assert versions == [0] * at + [1] * (len(versions) - at)
    return at


async def test_a_frozen_completion_goes_on_with_the_new_weights_and_carries_both_versions(
    engine: PausableEngine, other: Path, reference_logprobs: Logprobs
) -> None:
    ids, logprobs, versions = await spanning(engine, PauseMode.KEEP, WeightUpdate(1, str(other)))
    assert len(ids) == 120
    at = split(versions)
    assert 5 <= at < 120
    assert logprobs[:at] == pytest.approx(reference_logprobs(PROMPT, ids)[:at], abs=1e-3)
    # What was computed before the update stays: the first token after it was fed to old keys and values.
    assert logprobs[at] != pytest.approx(reference_logprobs(PROMPT, ids)[at], abs=1e-3)


async def test_a_broken_off_completion_is_continued_exactly_as_the_new_weights_would(
    engine: PausableEngine, other: Path, reference_logprobs: Logprobs, other_logprobs: Logprobs
) -> None:
    ids, logprobs, versions = await spanning(engine, PauseMode.ABORT, WeightUpdate(1, str(other)))
    assert len(ids) == 120
    at = split(versions)
    assert logprobs[:at] == pytest.approx(reference_logprobs(PROMPT, ids)[:at], abs=1e-3)
    assert logprobs[at:] == pytest.approx(other_logprobs(PROMPT, ids)[at:], abs=1e-3)


async def test_a_drained_completion_has_the_old_weights_only(
    engine: PausableEngine, other: Path, reference_logprobs: Logprobs
) -> None:
    ids, logprobs, versions = await spanning(engine, PauseMode.DRAIN, WeightUpdate(1, str(other)))
    assert versions == [0] * 120
    assert logprobs == pytest.approx(reference_logprobs(PROMPT, ids), abs=1e-3)


async def test_nothing_cached_of_the_old_weights_is_reused(
    engine: PausableEngine, server: EmbeddedServer, other: Path, other_logprobs: Logprobs
) -> None:
    await sampled(engine, asked(8))
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(WeightUpdate(1, str(other)))
    await engine.resume()
    chunks = await sampled(engine, asked(8))
    ids, logprobs, versions = joined(chunks)
    assert (versions, chunks[-1].cached_tokens) == ([1] * 8, 0)
    assert logprobs == pytest.approx(other_logprobs(PROMPT, ids), abs=1e-3)
    again = await sampled(engine, asked(8))
    assert again[-1].cached_tokens == len(PROMPT) - 1


async def test_the_slot_of_a_spanning_request_serves_no_other(tiny: SlotModel, other: Path) -> None:
    scheduler = Scheduler(tiny)
    scheduler.submit(0, Generation(PROMPT, 4))
    scheduler.step()
    scheduler.use(read_weights(1, other, tiny.directory, tiny.weights))
    scheduler.submit(1, Generation([*PROMPT, 7], 2))
    tokens = []
    while scheduler.has_work:
        tokens += scheduler.step()
    scheduler.submit(2, Generation([*PROMPT, 8], 1))
    tokens += scheduler.step()
    assert {token.request: token.cached_tokens for token in tokens} == {0: 0, 1: 0, 2: len(PROMPT)}
    assert all(token.policy_version == 1 for token in tokens)


async def test_a_prompt_that_is_prefilled_in_part_begins_anew(
    tiny: SlotModel, other: Path, other_logprobs: Logprobs
) -> None:
    scheduler = Scheduler(tiny, Chunks(shared=8, alone=8))
    scheduler.submit(0, Generation(PROMPT, 3))
    scheduler.step()
    scheduler.use(read_weights(1, other, tiny.directory, tiny.weights))
    tokens = []
    while scheduler.has_work:
        tokens += scheduler.step()
    ids = [token.token_id for token in tokens]
    assert [token.logprob for token in tokens] == pytest.approx(other_logprobs(PROMPT, ids), abs=1e-3)


async def test_what_comes_during_a_pause_waits(engine: PausableEngine, server: EmbeddedServer) -> None:
    direct = VllmEngine(server.url)
    await engine.pause(PauseMode.KEEP)
    sampling = [
        asyncio.create_task(sampled(engine, asked(3))),
        asyncio.create_task(sampled(PausableEngine(direct), asked(3))),
    ]
    scoring = asyncio.create_task(direct.score(PROMPT))
    assert await still_waits(*sampling, scoring)
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}/is_paused") as answer:
        assert await answer.json() == {"is_paused": True}
    await engine.resume()
    async with asyncio.timeout(10):
        mine, direct_ones = await asyncio.gather(*sampling)
        assert len(await scoring) == len(PROMPT)
    assert joined(mine)[0] == joined(direct_ones)[0]
    await direct.close()


async def test_a_scored_prompt_meets_one_policy_only(
    client: VllmEngine,
    engine: PausableEngine,
    other: Path,
    reference_logprobs: Logprobs,
    other_logprobs: Logprobs,
) -> None:
    ids = [(3 * at) % 200 for at in range(250)]
    scores = [asyncio.create_task(client.score(ids)) for _ in range(4)]
    await asyncio.sleep(0)
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(WeightUpdate(1, str(other)))
    await engine.resume()
    old, new = reference_logprobs(ids[:1], ids[1:]), other_logprobs(ids[:1], ids[1:])
    for score in await asyncio.gather(*scores):
        assert score[1:] == pytest.approx(old, abs=1e-2) or score[1:] == pytest.approx(new, abs=1e-2)


async def test_one_file_in_shared_memory_will_do(
    engine: PausableEngine, other: Path, other_logprobs: Logprobs
) -> None:
    shared = Path(f"/dev/shm/polar-test-{uuid4().hex}.safetensors")
    shared.write_bytes((other / "m.safetensors").read_bytes())
    try:
        await engine.pause(PauseMode.KEEP)
        await engine.update_weights(WeightUpdate(3, str(shared)))
    finally:
        shared.unlink()
    await engine.resume()
    ids, logprobs, versions = joined(await sampled(engine, asked(8)))
    assert versions == [3] * 8
    assert logprobs == pytest.approx(other_logprobs(PROMPT, ids), abs=1e-3)
    assert (await engine.model_info()).policy_version == 3


async def test_other_weights_of_the_same_number_are_loaded(
    engine: PausableEngine, other: Path, other_logprobs: Logprobs, tiny_directory: Path
) -> None:
    """As of another system, which used the engine before."""
    await engine.update_weights(WeightUpdate(1, str(tiny_directory)))
    await engine.update_weights(WeightUpdate(1, str(other)))
    ids, logprobs, versions = joined(await sampled(engine, asked(8)))
    assert versions == [1] * 8
    assert logprobs == pytest.approx(other_logprobs(PROMPT, ids), abs=1e-3)


async def test_no_path_returns_to_the_first_weights(
    engine: PausableEngine, other: Path, reference_logprobs: Logprobs
) -> None:
    await engine.update_weights(WeightUpdate(1, str(other)))
    await engine.update_weights(WeightUpdate(2))
    ids, logprobs, versions = joined(await sampled(engine, asked(8)))
    assert versions == [2] * 8
    assert logprobs == pytest.approx(reference_logprobs(PROMPT, ids), abs=1e-3)


async def test_a_lora_adapter_is_merged(
    client: VllmEngine, engine: PausableEngine, tiny_directory: Path, other: Path, tmp_path: Path
) -> None:
    """Always into the weights that the engine was started with, whatever it sampled with before."""
    torch.manual_seed(3)
    name = "model.layers.0.self_attn.q_proj"
    down, up = torch.randn(4, 64), torch.randn(64, 4)
    prefix = f"base_model.model.{name}"
    save_file(
        {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up},
        tmp_path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()
    with torch.no_grad():
        model.get_parameter(f"{name}.weight").add_(2 * up @ down)
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    await engine.update_weights(WeightUpdate(1, str(other)))
    await engine.update_weights(WeightUpdate(2, str(tmp_path)))
    scores = await client.score(PROMPT)
    assert scores[1:] == pytest.approx(
        [float(expected[at, id]) for at, id in enumerate(PROMPT[1:])], abs=1e-3
    )


@pytest.mark.parametrize("fault", ["missing", "empty", "partial", "shape", "nan", "garbage"])
async def test_weights_that_are_not_the_models_change_nothing(
    engine: PausableEngine, tiny_directory: Path, tmp_path: Path, reference_logprobs: Logprobs, fault: str
) -> None:
    tensors = load_file(tiny_directory / "model.safetensors")
    directory = tmp_path / "weights"
    if fault != "missing":
        directory.mkdir()
    match fault:
        case "partial":
            tensors.pop("model.norm.weight")
        case "shape":
            tensors["model.norm.weight"] = torch.ones(3)
        case "nan":
            tensors["model.norm.weight"][0] = float("nan")
    if fault in ("partial", "shape", "nan"):
        save_file(tensors, directory / "m.safetensors")
    if fault == "garbage":
        (directory / "m.safetensors").write_bytes(b"no weights" * 100)
    await engine.pause(PauseMode.KEEP)
    with pytest.raises(EngineError, match=str(directory)):
        await engine.update_weights(WeightUpdate(1, str(directory)))
    await engine.resume()
    ids, logprobs, versions = joined(await sampled(engine, asked(4)))
    assert versions == [0] * 4
    assert logprobs == pytest.approx(reference_logprobs(PROMPT, ids), abs=1e-3)


async def test_weights_that_are_tied_may_come_under_one_name(tmp_path: Path) -> None:

    directory = write_tiny_llama(tmp_path, tie_word_embeddings=True)
    tied = load(EngineSettings(model=str(directory), device="cpu", slots=1))
    policy = read_weights(1, None, tied.directory, tied.weights)
    assert "lm_head.weight" not in policy.tensors
    tied.use(policy.tensors)


async def test_a_client_that_leaves_during_a_pause_leaves_nothing_behind(
    engine: PausableEngine, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aclosing(engine.generate(asked(100))) as chunks:
        await anext(chunks)
        await engine.pause(PauseMode.KEEP)
    generate, has_come = server.worker.generate, asyncio.Event()

    def observed(generation: Generation) -> AsyncGenerator[list[Sampled]]:
        has_come.set()
        return generate(generation)

    monkeypatch.setattr(server.worker, "generate", observed)
    held = asyncio.create_task(sampled(PausableEngine(VllmEngine(server.url)), asked(3)))
    await has_come.wait()
    held.cancel()
    await asyncio.wait({held})
    await engine.resume()
    await server.worker.resume()
    assert server.scheduler.table.free == 4
