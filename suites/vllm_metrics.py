"""What a vLLM's page of metrics says."""

from __future__ import annotations

import re

import aiohttp


async def metric(url: str, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        text = await response.text()
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


async def is_idle(url: str) -> bool:
    """Whether it computes for nobody."""
    return await metric(url, "num_requests_running") == 0
