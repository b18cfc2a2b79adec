"""How long a stream stands still while another session of its node ends with much to build and to pack."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from itertools import pairwise
from pathlib import Path

import numpy as np

from polar.gateway.session import SessionGrant, new_key
from polar.models.chat import FinishReason, Message, Role
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from polar.recordings.capture import CaptureWriter
from tests.fakes.scripted_engine import Answer
from tests.systems import System, shell_task, system

CALLS, MESSAGE_BYTES, PROMPT_TOKENS = 250, 2_000_000, 2_000
"""Half a gigabyte of capture: an agent that sends large files again and again."""
ARTIFACT_BYTES = 32 * 1024 * 1024
TOKEN_SECONDS = 0.005
QUIET_SECONDS = 5.0
AGENT = f"head -c {ARTIFACT_BYTES} /dev/urandom > out.bin; touch ready; until test -e go; do sleep 0.1; done"


async def measure() -> dict[str, float]:
    """The longest gap between two reads of a stream in ms, `while ending` and `while quiet`."""
    with tempfile.TemporaryDirectory() as directory:
        capture = Path(directory) / "capture"
        # Made elsewhere: what it takes is not to be measured, nor to be in this process's memory.
        await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "benchmarks.lifecycle_gap", str(capture)], check=True
        )
        answer = Answer("word " * 900_000, ends=False)
        async with system(Path(directory) / "data", [answer], max_context=2_000_000) as running:
            return await _gaps(running, capture)


async def _gaps(running: System, capture: Path) -> dict[str, float]:
    await running.client.submit(shell_task("chatty", AGENT, artifacts=["out.bin"]))
    # Twice as much as the one file: the logs count too.
    async with running.node(artifact_bytes=2 * ARTIFACT_BYTES) as node:
        workspace = await _agent_is_ready(running.data_dir)
        os.replace(capture, node._runs["chatty.0"].capture)
        reads: list[float] = []
        stream = asyncio.create_task(_watch(running, reads))
        while len(reads) < 10:  # noqa: ASYNC110
            await asyncio.sleep(TOKEN_SECONDS)
        quiet = await _longest_gap(reads, asyncio.sleep(QUIET_SECONDS))
        (workspace / "go").touch()
        ending = await _longest_gap(reads, running.client.wait(["chatty"], timeout=600))
        stream.cancel()
        (result,) = await running.client.wait(["chatty"])
    assert (result.stats.completions, result.has_artifacts) == (CALLS, True), result
    return {"while quiet": quiet, "while ending": ending}


async def _agent_is_ready(data_dir: Path) -> Path:
    while not (found := list(data_dir.glob("nodes/*/sessions/*/files/workspace/ready"))):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return found[0].parent


async def _longest_gap(reads: list[float], work: Awaitable[object]) -> float:
    del reads[:-1]
    await work
    return 1000 * max(after - before for before, after in pairwise(reads))


async def _watch(running: System, reads: list[float]) -> None:
    """Read a session's stream, noting when its bytes came."""
    key = new_key()
    grant = SessionGrant("watched", key, running.data_dir / "watched.log", SamplingPin(), Budgets())
    running.gateway.open_session(grant)
    _pace(running)
    async for moment in _moments(running.gateway.host, running.gateway.port, key):
        reads.append(moment)  # noqa: PERF401


def _pace(running: System) -> None:
    async def slowly(_answer: Answer, _start: int) -> None:
        await asyncio.sleep(TOKEN_SECONDS)

    running.engine._stage = slowly  # type: ignore[method-assign, assignment]


async def _moments(host: str, port: int, key: str) -> AsyncIterator[float]:
    reader, writer = await asyncio.open_connection(host, port)
    body = json.dumps(
        {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "Go on."}]}
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body.encode())
    try:
        while await reader.read(1 << 16):
            yield time.perf_counter()
    finally:
        writer.close()


def write_capture(path: Path) -> None:
    """A log of calls with large messages that share nothing."""
    draw = np.random.default_rng(0)
    words = [draw.bytes(3).hex() for _ in range(4096)]
    log = CaptureWriter(path)
    for index in range(CALLS):
        text = " ".join(draw.choice(words, MESSAGE_BYTES // 7))
        log.append(
            Completion(
                id=f"c{index}",
                index=index,
                prompt_ids=draw.integers(0, 50_000, PROMPT_TOKENS).astype(np.int32),
                sampled_ids=np.arange(100, dtype=np.int32),
                logprobs=np.full(100, -1.0, np.float32),
                policy_versions=np.zeros(100, np.int32),
                messages=(Message(Role.USER, text),),
                response=Message(Role.ASSISTANT, "Yes."),
                finish_reason=FinishReason.STOP,
            )
        )
    log.close()


if __name__ == "__main__":
    write_capture(Path(sys.argv[1]))
