"""Vercel's `ai` as it is, run by our Node.js: packages and their hashes are pinned in tests/node."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.node import install_npm, node

_NODE = Path(__file__).parent / "node"
_LOCK = _NODE / "package-lock.json"


async def tool_loop(provider: str, model: str, mode: str) -> tuple[str, ...]:
    """The command of a loop of steps with one tool, which prints what the model said last."""
    root = await asyncio.to_thread(_packages)
    # A module finds its packages beside itself.
    script = Path(shutil.copy(_NODE / "tool_loop.mjs", root))
    return (str(node() / "bin" / "node"), str(script), provider, model, mode)


async def run_tool_loop(provider: str, model: str, mode: str, environment: Mapping[str, str]) -> str:
    """What the model said last."""
    process = await asyncio.create_subprocess_exec(
        *await tool_loop(provider, model, mode),
        env={"PATH": os.environ["PATH"], **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


def _packages() -> Path:
    pins = hashlib.sha256(_LOCK.read_bytes()).hexdigest()
    return asset(f"vercel-{pins[:16]}", partial(install_npm, _LOCK))
