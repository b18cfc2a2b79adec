"""Throughput and time to first token of vLLM through the gateway, against vLLM asked directly, in one run."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from polar.app.stack import data_plane
from polar.config.settings import Settings
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.models.task import Budgets, SamplingPin
from suites.gpu.vllm.load import Answered, Target, converse_all

pytestmark = pytest.mark.timeout(400)

CONVERSATIONS = int(os.environ.get("POLAR_CONVERSATIONS", "64"))
TURNS = int(os.environ.get("POLAR_TURNS", "5"))
ROUNDS = int(os.environ.get("POLAR_ROUNDS", "3"))
CLIENTS = int(os.environ.get("POLAR_CLIENTS", "4"))
"""Processes that share the conversations, so that none is what is measured."""
NEW = 128
"""Tokens of each turn."""
ALONE = int(os.environ.get("POLAR_ALONE", "20"))
"""Turns of one conversation at a time, for the time to first token."""
LEAST_SHARE = 0.97
MOST_ADDED_MS = 5.0


async def test_conversations_run_as_fast_through_the_gateway(
    settings: Settings, vllm_url: str, record: Any, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(CLIENTS, mp_context=spawn) as clients:
        async with data_plane(settings, lambda _step: None) as plane:
            direct = Target(f"{vllm_url}/v1", "none", asks_for_ids=True)
            ends = await _ends(settings)

            async def run(
                count: int, turns: int, new: int, seed: int, target: Callable[[int], Any]
            ) -> tuple[float, list[Answered]]:
                targets = [await target(at) for at in range(count)]
                shares = [targets[at::CLIENTS] for at in range(CLIENTS) if targets[at::CLIENTS]]
                began = time.perf_counter()
                answers = await asyncio.gather(
                    *(
                        loop.run_in_executor(
                            clients, converse_all, share, plane.model.name, ends, turns, new, seed + 1000 * at
                        )
                        for at, share in enumerate(shares)
                    )
                )
                return time.perf_counter() - began, [turn for each in answers for turn in each]

            async def straight(_at: int) -> Target:
                return direct

            opened = iter(range(1_000_000))

            async def through(_at: int) -> Target:
                return _session(plane.gateway, f"s{next(opened)}", tmp_path)

            ways = {"direct": straight, "gateway": through}
            # Both ways once, uncounted: processes start, and vLLM compiles what it has not seen.
            for at, way in enumerate(ways.values()):
                await run(CONVERSATIONS, 1, NEW, 10_000_000 + 1_000_000 * at, way)
            rates: dict[str, list[float]] = {name: [] for name in ways}
            loaded: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(ROUNDS):
                for at, (name, way) in enumerate(sorted(ways.items(), reverse=number % 2 == 0)):
                    seconds, turns = await run(
                        CONVERSATIONS, TURNS, NEW, 20_000_000 + 100_000 * (2 * number + at), way
                    )
                    rates[name].append(sum(turn.tokens for turn in turns) / seconds)
                    loaded[name] += [1000 * turn.first_token for turn in turns]
            alone: dict[str, list[float]] = {name: [] for name in ways}
            for number in range(ALONE):
                for at, (name, way) in enumerate(ways.items()):
                    _, (turn,) = await run(1, 1, 8, 90_000_000 + 2 * number + at, way)
                    alone[name].append(1000 * turn.first_token)
    share = median(rates["gateway"]) / median(rates["direct"])
    added = median(alone["gateway"]) - median(alone["direct"])
    record("tokens per second", rates | {"gateway / direct": share})
    record("first token, one at a time, ms", alone | {"added": added})
    record(
        f"first token, {CONVERSATIONS} at once, ms",
        {
            name: {"median": median(found), "p95": sorted(found)[int(0.95 * len(found))]}
            for name, found in loaded.items()
        },
    )
    assert share >= LEAST_SHARE
    assert added <= MOST_ADDED_MS


def _session(gateway: Gateway, name: str, directory: Path) -> Target:
    grant = SessionGrant(name, new_key(), directory / name, SamplingPin(), Budgets())
    gateway.open_session(grant)
    return Target(f"{gateway.url}/v1", grant.key, asks_for_ids=False)


async def _ends(settings: Settings) -> list[int]:
    from polar.rendering.families import renderer_for

    return list(renderer_for("-", Path(settings.engine.model)).stop_token_ids)
