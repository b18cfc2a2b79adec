"""The embedded engine on a GPU: 64 agents at once, against batched `model.generate` of the same weights."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import aiohttp
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import Row, report
from polar.config.settings import EngineSettings
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.scheduler import Generation, Scheduler
from polar.engines.embedded.server import EmbeddedServer
from polar.engines.embedded.weights import ensure_model

AGENTS = 64
PROMPT = 1500
NEW = 128
TURN = 100
"""Tokens of a tool's result that a next turn adds."""
REPEATS = 3
GOAL = 5_000


def ids(seed: int, length: int) -> list[int]:
    return [int(id) for id in np.random.default_rng(seed).integers(100, 40_000, length)]


def run(scheduler: Scheduler, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
    """Seconds until all have their tokens, and these."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    sampled: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        scheduler.submit(number, Generation(prompt, new, seed=number))
    while scheduler.has_work:
        for token in scheduler.step():
            sampled[token.request].append(token.token_id)
    return time.perf_counter() - began, sampled


def plain(model: Any, prompts: list[list[int]]) -> float:
    inputs = torch.tensor(prompts, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            min_new_tokens=NEW,
            max_new_tokens=NEW,
            do_sample=True,
            top_k=0,
        )
    torch.cuda.synchronize()
    return time.perf_counter() - began


async def stream(url: str, seed: int) -> float:
    """Seconds for all agents, each reading its answer as the gateway does."""

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        body = {
            "prompt": ids(seed + number, PROMPT),
            "max_tokens": NEW,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,
            "return_token_ids": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session, number) for number in range(AGENTS)))
        return time.perf_counter() - began


def stream_in_process(url: str, seed: int) -> float:
    return asyncio.run(stream(url, seed))


async def served(model: SlotModel, seed: int) -> float:
    """As `stream`, the agents in a process of their own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as agents:
        async with EmbeddedServer(model) as server:
            return await asyncio.get_running_loop().run_in_executor(
                agents, stream_in_process, server.url, seed
            )


def main(name: str) -> None:
    settings = EngineSettings(model=name, device="cuda", slots=AGENTS)
    peer = AutoModelForCausalLM.from_pretrained(ensure_model(settings.model), dtype=torch.bfloat16)
    peer = peer.to("cuda").eval()
    began = time.perf_counter()
    model = load(settings)
    loading = time.perf_counter() - began
    scheduler = Scheduler(model)
    run(scheduler, [ids(1, 600), ids(2, 40)], 8)
    plain(peer, [ids(at, 100) for at in range(2)])
    seconds: dict[str, list[float]] = {"ours": [], "peer": [], "turn": [], "decode": [], "served": []}
    for repeat in range(REPEATS):
        prompts = [ids(1000 * (repeat + 1) + at, PROMPT) for at in range(AGENTS)]
        took, sampled = run(scheduler, prompts, NEW)
        seconds["ours"].append(took)
        seconds["peer"].append(plain(peer, prompts))
        following = [p + s + ids(at, TURN) for at, (p, s) in enumerate(zip(prompts, sampled, strict=True))]
        seconds["turn"].append(run(scheduler, following, NEW)[0])
        seconds["decode"].append(run(scheduler, following, 2 * NEW)[0] - run(scheduler, following, NEW)[0])
        seconds["served"].append(asyncio.run(served(model, 9000 * (repeat + 1))))
    best = {name: min(found) for name, found in seconds.items()}
    count = AGENTS * NEW
    rate, peer_rate = count / best["ours"], count / best["peer"]
    report(
        "engine on a GPU",
        [
            Row(
                f"{AGENTS} fresh prompts of {PROMPT} tokens",
                rate,
                "tok/s",
                peer_rate,
                f"≥ {GOAL:,} on an H200",
                rate >= GOAL,
            ),
            Row(f"{AGENTS} next turns", count / best["turn"], "tok/s", peer_rate),
            Row("decoding alone", count / best["decode"], "tok/s", peer_rate),
            Row(f"{AGENTS} fresh prompts, streamed over HTTP", count / best["served"], "tok/s", peer_rate),
            Row("loading, with graphs", loading, "s"),
        ],
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else EngineSettings().model)
