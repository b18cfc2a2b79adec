"""An engine that says in a file where it listens, and in another one what it has sampled."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes.answering_engine import answering_engine
from tests.fakes.character_chat import Said

ANSWER_SECONDS = 0.2
"""How long an answer takes, so that calls are in flight when a node is killed."""
QUESTION = "Say something."
"""What agents ask first; nodes that look what the engine can do ask otherwise."""


def run(address: Path, sampled: Path) -> None:
    asyncio.run(_serve(address, sampled))


def sampled_answers(sampled: Path) -> list[str]:
    """What agents were to be answered, whether or not it arrived; each answer is given once."""
    return sampled.read_text().splitlines()


def tokens_of(answer: str) -> int:
    return len(Said(answer).tokens)


def _answering(sampled: Path) -> Callable[[dict[str, Any]], Said]:
    def answer(body: dict[str, Any]) -> Said:
        said = f"A fine answer, {secrets.token_hex(6)}."
        if body["messages"][0]["content"] == QUESTION:
            with sampled.open("a") as file:
                file.write(said + "\n")
        return Said(said)

    return answer


async def _serve(address: Path, sampled: Path) -> None:
    async with answering_engine(_answering(sampled), seconds=ANSWER_SECONDS) as engine:
        part = address.with_suffix(".part")
        part.write_text(engine.url)
        os.replace(part, address)
        print("listening", flush=True)
        await asyncio.Event().wait()
