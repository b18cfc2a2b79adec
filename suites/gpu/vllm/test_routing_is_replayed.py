"""A real vLLM that tells its experts: sent to the same, tokens are as likely to the trainer as to vLLM.

POLAR_VLLM_MOE_URL names a server of a mixture of experts, POLAR_VLLM_MOE_MODEL its directory:

    python -m tests.fakes.tiny_moe DIR --like $POLAR_VLLM_MODEL
    vllm serve DIR --served-model-name tiny-moe --dtype bfloat16 --logprobs-mode processed_logprobs \
        --enable-prefix-caching --enable-return-routed-experts --enable-prompt-tokens-details \
        --max-model-len 4096 --gpu-memory-utilization 0.1 --enforce-eager
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.training.faithfulness import compare
from polar.config.settings import EngineSettings, Settings
from polar.models.completion import UNROUTED
from polar.training.settings import ModelSettings
from polar.trajectory.materialise import materialise
from polar.trajectory.packing.batch import row
from polar.trajectory.prefix_merging import PrefixMerging
from tests.captures import grow

QUESTIONS = (
    "Write a Python function that reverses a linked list.",
    "Explain what a mutex is to a child.",
    "Tell a short story about a lighthouse.",
    "List the first ten prime numbers and say what a prime is.",
)
TURNS = 3
TOKENS = 96
BLOCK = 16
"""Of vLLM's prefix cache, which holds whole ones: what a stream lost of the last is not known."""

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="session")
def moe_directory() -> Path:
    return Path(os.environ["POLAR_VLLM_MOE_MODEL"])


@pytest.fixture
def settings(moe_directory: Path, tmp_path: Path) -> Settings:
    engine = EngineSettings(
        url=os.environ["POLAR_VLLM_MOE_URL"], model=str(moe_directory), mode="tokens", record_routing=True
    )
    return Settings(data_dir=tmp_path, engine=engine)


async def converse(scene: Any, question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        stream = await scene.client.chat.completions.create(
            model=scene.model, messages=messages, max_tokens=TOKENS, stream=True
        )
        said = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        messages += [
            {"role": "assistant", "content": "".join(said)},
            {"role": "user", "content": "Say it in other words."},
        ]


async def test_replay_brings_the_trainer_to_the_logprobs_of_the_engine(
    opened: Any, moe_directory: Path, record: Any
) -> None:
    async with opened(temperature=1.0, seed=7) as scene:
        await asyncio.gather(*(converse(scene, question) for question in QUESTIONS))
        size = scene.grant.capture.stat().st_size
        completions = await scene.captured()
    assert len(completions) == TURNS * len(QUESTIONS)
    assert all(completion.routing is not None for completion in completions)
    unrouted = [int(completion.extra.get(UNROUTED, 0)) for completion in completions]
    record("tokens without experts, of each completion", unrouted)
    assert max(unrouted) <= BLOCK
    sampled = sum(len(completion.sampled_ids) for completion in completions)
    trajectory = PrefixMerging(PrefixMerging.Options()).build(grow(completions))
    traces = [materialise(trajectory, ref) for ref in trajectory.traces]
    rows = [row(str(at), trace) for at, trace in enumerate(traces)]
    assert sum(trace.unrouted_tokens for trace in traces) <= sum(unrouted)
    routing = np.concatenate([trace.routing for trace in traces if trace.routing is not None])
    record(
        "routing",
        {
            "completions": len(completions),
            "continued": sum(completion.parent is not None for completion in completions),
            "traces": len(traces),
            "sampled tokens": sampled,
            "shape": routing.shape,
            "dtype": str(routing.dtype),
            "experts seen": len(np.unique(routing)),
            "bytes of the capture": size,
        },
    )
    means = {}
    for kind in ("own", "replay"):
        settings = ModelSettings(name=str(moe_directory)).model_copy(update={"routing": kind})
        found = compare(rows, settings, "bfloat16", 4096, 1.0)
        means[kind] = found.mean
        figures = {"tokens": found.tokens, "mean": found.mean, "p99": found.p99, "max": found.max}
        record(f"logprobs, routing {kind}", figures | {"mean |ratio - 1|": found.ratio})
    assert means["replay"] < means["own"] / 2
    assert means["replay"] < 0.1


async def test_a_stream_that_is_left_costs_only_its_own_routing(opened: Any) -> None:
    async with opened(temperature=1.0, seed=3) as scene:
        ask: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
        stream = await scene.client.chat.completions.create(
            model=scene.model, messages=ask, max_tokens=2000, stream=True
        )
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                break
        await stream.close()
        await scene.client.chat.completions.create(model=scene.model, messages=ask, max_tokens=TOKENS)
        left, whole = sorted(await scene.captured(), key=lambda one: one.finish_reason != "cancelled")
    assert left.finish_reason == "cancelled"
    assert left.routing is None
    assert int(left.extra[UNROUTED]) > 0
    assert whole.routing is not None
