"""Polar's gateway alone, with many open sessions, on the loop that `polar serve` has.

    python -m gateway.ours MODE ENGINE_URL SESSIONS DIRECTORY

Prints its port. The key of session N is `polar-bench-N`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import uvloop

from polar.app.stack import data_plane
from polar.config.settings import load_settings
from polar.gateway.session import SessionGrant
from polar.models.task import Budgets, SamplingPin


async def serve(mode: str, url: str, sessions: int, directory: Path) -> None:
    settings = load_settings(None, {"data_dir": directory, "engine": {"url": url, "mode": mode}})
    async with data_plane(settings, lambda _: None) as plane:
        for number in range(sessions):
            grant = SessionGrant(
                f"s{number}", f"polar-bench-{number}", directory / f"{number}.log", SamplingPin(), Budgets()
            )
            plane.gateway.open_session(grant)
        print("ready", plane.gateway.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    mode, url, sessions, directory = sys.argv[1:]
    uvloop.run(serve(mode, url, int(sessions), Path(directory)))
