"""Polar's gateway alone, with many open sessions, on the loop that `polar serve` has.

    python -m gateway.ours MODE WORKERS ENGINE_URL SESSIONS DIRECTORY

Prints its ports, one for each worker. The key of session N is `polar-bench-N`; sessions go round the ports.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from polar.app.stack import data_plane
from polar.config.settings import load_settings
from polar.gateway.session import SessionGrant
from polar.models.task import Budgets, SamplingPin


async def serve(mode: str, workers: int, url: str, sessions: int, directory: Path) -> None:
    settings = load_settings(
        None,
        {"data_dir": directory, "engine": {"url": url, "mode": mode}, "gateway": {"workers": workers}},
    )
    async with data_plane(settings, lambda _: None) as plane, AsyncExitStack() as parts:
        ports = []
        for number in range(sessions):
            ports.append(parts.enter_context(plane.gateway.placed(f"s{number}")).port)
            grant = SessionGrant(
                f"s{number}", f"polar-bench-{number}", directory / f"{number}.log", SamplingPin(), Budgets()
            )
            await plane.gateway.open_session(grant)
        print("ready", *ports[:workers], flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    mode, workers, url, sessions, directory = sys.argv[1:]
    uvloop.run(serve(mode, int(workers), url, int(sessions), Path(directory)))
