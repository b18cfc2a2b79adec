"""An engine that says in a file where it listens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tests.fakes.answering_engine import answering_engine
from tests.fakes.character_chat import Said


def run(address: Path) -> None:
    asyncio.run(_serve(address))


async def _serve(address: Path) -> None:
    async with answering_engine(lambda _body: Said("A fine answer.")) as engine:
        part = address.with_suffix(".part")
        part.write_text(engine.url)
        os.replace(part, address)
        print("listening", flush=True)
        await asyncio.Event().wait()
