"""Engine clients whose patience is short enough for tests, and what they are asked."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path

import pytest

from polar.engines import http
from polar.engines.base import ChatCall, Engine, GenerateRequest
from polar.engines.pausable import PausableEngine
from polar.models.chat import ChatRequest, Message, Role, Sampling

REQUEST = GenerateRequest("r", [1, 2, 3], Sampling(temperature=1.0, max_tokens=8), session="s")


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_BACKOFF_SECONDS", 0.001)


async def versions(engine: Engine | PausableEngine, mode: str) -> set[int]:
    """Those of the tokens of one answer."""
    if mode == "tokens":
        return {chunk.policy_version async for chunk in engine.generate(REQUEST)}
    chat = ChatRequest("", (Message(Role.USER, "Hi"),), stream=True)
    begun = engine.chat(ChatCall("c", chat, Sampling(max_tokens=8)))
    chunks = [chunk async for chunk in (await begun if isinstance(begun, Coroutine) else begun)]
    return {chunk.tokens.policy_version for chunk in chunks if chunk.tokens is not None}


def adapter_in(directory: Path, name: str = "adapter") -> str:
    path = directory / name
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").touch()
    return str(path)
