"""Weights reach a vLLM that samples all the while: how long it stands still, and how tokens are stamped.

Some tests need a second server: POLAR_VLLM_LORA_URL names one with `--enable-lora`, which takes adapters and
nothing else, POLAR_VLLM_REPLICA_URL one like the first, POLAR_VLLM_NCCL_URL one that takes weights over NCCL.

NCCL refuses two members on one GPU, unless they say that they are on different machines; then they talk over
sockets, which shows that it works, and not how fast. The server is started with

    VLLM_SERVER_DEV_MODE=1 NCCL_HOSTID=engine NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1 \\
    NCCL_SHM_DISABLE=1 NCCL_DEBUG=INFO vllm serve DIR --served-model-name NAME --port 8003 \\
    --logprobs-mode processed_logprobs --enable-prefix-caching --gpu-memory-utilization 0.3 \\
    --weight-transfer-config '{"backend": "nccl"}'

and this test with the same environment but for NCCL_HOSTID=trainer, with vLLM importable:

    POLAR_VLLM_NCCL_URL=http://127.0.0.1:8003 POLAR_VLLM_URL=http://127.0.0.1:8003 POLAR_VLLM_MODEL=DIR \\
    python -m pytest suites/gpu/vllm/test_weights_reach_vllm.py -k nccl -s -o log_cli=1 -o log_cli_level=INFO
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import pytest
import torch

from polar.app.weights import EngineWeights
from polar.engines.base import WeightUpdate
from polar.engines.nccl import Sender
from polar.engines.transfer import Share, SharedTensors
from polar.gateway.server import Gateway
from polar.models.completion import Completion
from polar.models.policy import PauseMode, PolicyView
from polar.training.policy import TrainerPolicy, load_policy
from polar.training.settings import Lora, ModelSettings

PRECISION: Any = os.environ.get("POLAR_VLLM_DTYPE", "bfloat16")
UPDATES = 3
SECONDS = 3.0
"""Of sampling, between updates."""
CONVERSATIONS = int(os.environ.get("POLAR_CONVERSATIONS", "16"))
NOISE = 0.05
"""What is added to weights, as a share of their standard deviation: enough to be told from rounding."""
ADAPTER_NOISE = float(os.environ.get("POLAR_ADAPTER_NOISE", "0.008"))
LONGEST_SILENCE = 1.0
"""Seconds in which no conversation gets a token, on a GPU that nothing else uses. What is done once is not
in it, as the first weights come before the conversations: trainer and engine meet, NCCL starts, and Triton
compiles an adapter's kernels for the first token."""
LARGEST_MEAN = 0.05
"""The mean difference of logprobs in bfloat16, under the weights that a token is stamped with."""

WAY = re.compile(r"weights \d+ reached \S+ over (.+) in")
"""What the engine's client logs."""

pytestmark = pytest.mark.timeout(400)


class Orders:
    """Does with a gateway what a node does when the server orders new weights."""

    def __init__(self, gateway: Gateway, loop: asyncio.AbstractEventLoop) -> None:
        self._gateway = gateway
        self._loop = loop
        self._view = PolicyView(version=0, newest=0, path=None)
        self.paused: list[tuple[float, float]] = []

    def policy(self) -> PolicyView:
        return self._view

    def update_policy(self, path: Path, *, version: int) -> PolicyView:
        self._view = PolicyView(version=version, newest=version, path=str(path))
        asked: Future[None] = asyncio.run_coroutine_threadsafe(self._update(path, version), self._loop)
        asked.result()
        return self._view

    async def _update(self, path: Path, version: int) -> None:
        began = time.monotonic()
        await self._gateway.pause(PauseMode.KEEP)
        await self._gateway.update_weights(WeightUpdate(version, str(path)))
        await self._gateway.resume()
        self.paused.append((began, time.monotonic()))


@dataclass
class Load:
    """Conversations that never end, and when their text arrived."""

    scene: Any
    arrivals: list[float] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._talk(number)) for number in range(CONVERSATIONS)]
        try:
            await self.for_seconds(0)
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results

    async def for_seconds(self, seconds: float) -> None:
        """Until text has arrived for this long."""
        ends_at = time.monotonic() + seconds
        while not self.arrivals or self.arrivals[-1] < ends_at:
            self.arrived.clear()
            await self.arrived.wait()

    def longest_silence(self, begin: float, end: float) -> float:
        """Between two pieces of text, of all conversations, around some span of time."""
        times = np.sort(np.array(self.arrivals))
        first, last = np.searchsorted(times, begin) - 1, np.searchsorted(times, end) + 1
        return float(np.diff(times[max(first, 0) : last + 1]).max())

    async def _talk(self, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            messages = [{"role": "user", "content": f"Tell story {turn} of lighthouse number {number}."}]
            stream = await self.scene.client.chat.completions.create(
                model=self.scene.model, messages=messages, max_tokens=400, stream=True
            )
            async for _ in stream:
                self.arrivals.append(time.monotonic())
                self.arrived.set()


@pytest.mark.parametrize("transfer", ["files", "cuda-ipc"])
async def test_all_weights_reach_it_under_load(
    opened: Any, model_directory: Path, tmp_path: Path, record: Any, transfer: str
) -> None:
    policy = load_policy(ModelSettings(name=str(model_directory), precision=PRECISION), is_packed=False)
    await pushed_under_load(opened, policy, tmp_path, record, transfer, f"weights over {transfer}")


@pytest.mark.timeout(150, method="thread")
async def test_all_weights_are_sent_over_nccl_under_load(
    opened: Any, model_directory: Path, tmp_path: Path, record: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its time limit shows what every thread waits for, and ends the process: NCCL may wait for ever."""
    caplog.set_level("INFO")
    environment = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    record("NCCL here", {"torch's": torch.cuda.nccl.version(), "torch": torch.__version__, **environment})
    policy = load_policy(ModelSettings(name=str(model_directory), precision=PRECISION), is_packed=False)
    opened = partial(opened, os.environ["POLAR_VLLM_NCCL_URL"])
    name = "weights over nccl, by sockets"
    await pushed_under_load(opened, policy, tmp_path, record, "nccl", name, caplog=caplog, updates=2)
    ways = WAY.findall(caplog.text)
    record("how they came", ways)
    assert ways == ["NCCL"] * 3


async def test_an_adapter_reaches_it_under_load(
    opened: Any, model_directory: Path, tmp_path: Path, record: Any
) -> None:
    policy = load_policy(
        ModelSettings(name=str(model_directory), precision=PRECISION, lora=Lora(rank=16, alpha=32)),
        is_packed=False,
    )
    opened = partial(opened, os.environ["POLAR_VLLM_LORA_URL"])
    await pushed_under_load(opened, policy, tmp_path, record, "files", "an adapter")


async def test_two_replicas_change_their_weights_together(
    opened: Any, model_directory: Path, tmp_path: Path, record: Any, vllm_url: str
) -> None:
    urls = [vllm_url, os.environ["POLAR_VLLM_REPLICA_URL"]]
    policy = load_policy(ModelSettings(name=str(model_directory), precision=PRECISION), is_packed=False)
    name = "two replicas, weights over cuda-ipc"
    await pushed_under_load(partial(opened, ",".join(urls)), policy, tmp_path, record, "cuda-ipc", name, urls)


@asynccontextmanager
async def sharing(transfer: str) -> AsyncIterator[Share | None]:
    """How the weights of a test reach engines, if not as files alone."""
    if transfer != "nccl":
        yield SharedTensors if transfer == "cuda-ipc" else None
        return
    with Sender("127.0.0.1") as sender:
        yield sender.offer


def generated(url: str) -> float:
    """How many tokens a server has sampled since its start."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/metrics") as page:
        found = re.findall(r"^vllm:generation_tokens_total\S* (\S+)$", page.read().decode(), re.MULTILINE)
    return sum(map(float, found))


async def pushed_under_load(
    opened: Any,
    policy: TrainerPolicy,
    out: Path,
    record: Any,
    transfer: str,
    name: str,
    replicas: Sequence[str] = (),
    *,
    caplog: pytest.LogCaptureFixture | None = None,
    updates: int = UPDATES,
) -> None:
    """Push several versions while conversations go on, and score every token under every version."""
    spans, kept = [], []
    shared = tempfile.TemporaryDirectory(dir="/dev/shm")
    async with sharing(transfer) as share, opened(temperature=1.0) as scene:
        orders, load = Orders(scene.gateway, asyncio.get_running_loop()), Load(scene)
        sink = EngineWeights(cast(Any, orders), out, Path(shared.name), share=share)
        await asyncio.to_thread(sink.push, policy)
        if caplog is not None:
            # Found at once: what follows takes minutes of a GPU.
            assert WAY.findall(caplog.text) == ["NCCL"], caplog.text
        kept.append(await asyncio.to_thread(policy_tensors, policy))
        async with load.running():
            for version in range(2, updates + 2):
                await load.for_seconds(SECONDS)
                move(policy, seed=version)
                began = time.monotonic()
                assert await asyncio.to_thread(sink.push, policy) == version
                kept.append(await asyncio.to_thread(policy_tensors, policy))
                await load.for_seconds(0.1)
                spans.append((began, next(at for at in load.arrivals if at > orders.paused[-1][1])))
            before = [generated(url) for url in replicas]
            await load.for_seconds(2)
            after = [generated(url) for url in replicas]
        sink.wait_for_files()
        completions = [one for one in await scene.captured() if len(one.sampled_ids)]
    figures: dict[str, Any] = {
        "seconds from the step to the first token": [round(end - begin, 2) for begin, end in spans],
        "seconds of silence": [round(load.longest_silence(*span), 2) for span in spans],
        "seconds paused": [round(end - begin, 2) for begin, end in orders.paused],
        "tokens": int(sum(len(one.sampled_ids) for one in completions)),
        "completions over two versions": sum(
            len(set(one.policy_versions.tolist())) > 1 for one in completions
        ),
    }
    if replicas:
        sampled = [int(end - begin) for begin, end in zip(before, after, strict=True)]
        figures["tokens of each replica after the last update"] = sampled
    record(name, figures)
    shared.cleanup()
    figures |= await asyncio.to_thread(stamps, policy, completions, kept)
    record(name, figures)
    # Files are read by vLLM itself, and one of several readings is sometimes slower. On one GPU NCCL goes
    # through sockets, which says nothing of its speed.
    judged = median if transfer == "files" and not policy.is_adapter else max
    assert transfer == "nccl" or judged(figures["seconds of silence"]) <= LONGEST_SILENCE, figures
    assert figures["completions over two versions"] > 0
    assert all(figures.get("tokens of each replica after the last update", []))
    assert figures["mean difference under its own version"] < LARGEST_MEAN
    assert figures["mean difference under another"] > 3 * figures["mean difference under its own version"]
    assert figures["tokens that only another version explains"] == 0


def move(policy: TrainerPolicy, seed: int) -> None:
    """As an optimizer's step, but larger."""
    generator = torch.Generator(policy.device).manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters:
            if parameter.dim() < 2:
                continue
            noise = torch.randn(parameter.shape, generator=generator, device=policy.device)
            size = ADAPTER_NOISE if policy.is_adapter else NOISE * float(parameter.std())
            parameter.add_(noise.to(parameter.dtype), alpha=size)


def policy_tensors(policy: TrainerPolicy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in policy.parameters]


def stamps(
    policy: TrainerPolicy, completions: list[Completion], kept: list[list[torch.Tensor]]
) -> dict[str, Any]:
    """How far each token's logprob is from that under its version, and from those under the others."""
    chosen = [one for one in completions if len(set(one.policy_versions.tolist())) > 1]
    chosen += [one for one in completions if one not in chosen][:64]
    found: list[list[np.ndarray]] = [[] for _ in chosen]
    for tensors in kept:
        with torch.no_grad():
            for parameter, tensor in zip(policy.parameters, tensors, strict=True):
                parameter.copy_(tensor)
        for at, one in enumerate(chosen):
            found[at].append(scored(policy, one))
    own, other, close, strange = [], [], [], 0
    by_version: list[list[np.ndarray]] = [[] for _ in kept]
    for one, versions in zip(chosen, found, strict=True):
        differences = np.abs(np.stack(versions) - one.logprobs)
        is_own = np.arange(1, len(kept) + 1)[:, None] == one.policy_versions
        own_differences = differences.T[is_own.T]
        changes = np.flatnonzero(np.diff(one.policy_versions)) + 1
        close += [own_differences[max(at - 8, 0) : at + 8] for at in changes]
        own.append(own_differences)
        for at, differing in enumerate(by_version):
            differing.append(own_differences[one.policy_versions == at + 1])
        other.append(differences[~is_own])
        strange += int(((own_differences > 1.0) & (differences.min(axis=0) < 0.05)).sum())
    own_all, other_all = np.concatenate(own), np.concatenate(other)
    return {
        "tokens scored": len(own_all),
        "mean difference under its own version": float(own_all.mean()),
        "of each version": [round(float(np.concatenate(each).mean()), 4) for each in by_version],
        "99th percentile": float(np.quantile(own_all, 0.99)),
        "largest": float(own_all.max()),
        "mean difference within 8 tokens of a change": float(np.concatenate(close).mean()) if close else 0.0,
        "mean difference under another": float(other_all.mean()),
        "tokens that only another version explains": strange,
    }


def scored(policy: TrainerPolicy, one: Completion) -> np.ndarray:
    ids = torch.tensor([[*one.prompt_ids.tolist(), *one.sampled_ids.tolist()]], device=policy.device)
    with torch.no_grad(), torch.autocast(policy.device.type, torch.bfloat16, policy.device.type == "cuda"):
        logits = policy.model(ids).logits[0, len(one.prompt_ids) - 1 : -1].float()
    logprobs = logits.log_softmax(-1).gather(1, ids[0, len(one.prompt_ids) :, None])[:, 0]
    return np.asarray(logprobs.cpu())
