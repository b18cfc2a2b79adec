"""A running vLLM on a GPU: POLAR_VLLM_URL, with the model in POLAR_VLLM_MODEL, served in POLAR_VLLM_DTYPE.

    vllm serve DIR --served-model-name NAME --logprobs-mode processed_logprobs --enable-prefix-caching

What is measured is printed, and written as JSON to the file in POLAR_RESULTS.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from polar.app.stack import data_plane
from polar.config.settings import EngineSettings, Settings
from polar.gateway.server import Gateway
from polar.gateway.session import SessionGrant, new_key
from polar.models.completion import Completion
from polar.models.task import Budgets, SamplingPin
from tests.captures import read_capture

Record = Callable[[str, Any], None]
Open = Callable[..., AbstractAsyncContextManager["Scene"]]


@dataclass
class Scene:
    """One session of a gateway in front of the server."""

    gateway: Gateway
    grant: SessionGrant
    client: AsyncOpenAI
    model: str

    async def captured(self) -> list[Completion]:
        await self.gateway.close_session(self.grant.session_id)
        return read_capture(self.grant.capture)


def pytest_sessionstart(session: pytest.Session) -> None:
    missing = [name for name in ("POLAR_VLLM_URL", "POLAR_VLLM_MODEL") if name not in os.environ]
    if missing:
        pytest.exit(f"suites/gpu/vllm needs a vLLM that serves: set {' and '.join(missing)}", returncode=2)


@pytest.fixture(scope="session")
def vllm_url() -> str:
    return os.environ["POLAR_VLLM_URL"]


@pytest.fixture(scope="session")
def dtype() -> str:
    return os.environ.get("POLAR_VLLM_DTYPE", "bfloat16")


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return Path(os.environ["POLAR_VLLM_MODEL"])


@pytest.fixture(scope="session")
def record() -> Record:
    """Keep a measurement: at once, so that a later failure loses none."""
    file = Path(os.environ.get("POLAR_RESULTS", "vllm-on-gpu.json"))

    def keep(name: str, value: Any) -> None:
        found = json.loads(file.read_text()) if file.is_file() else {}
        found[name] = value
        file.write_text(json.dumps(found, indent=2))
        print(name, json.dumps(value))

    return keep


@pytest.fixture
def settings(vllm_url: str, model_directory: Path, tmp_path: Path) -> Settings:
    engine = EngineSettings(url=vllm_url, model=str(model_directory), mode="tokens")
    return Settings(data_dir=tmp_path, engine=engine)


@pytest.fixture
def opened(settings: Settings, tmp_path: Path) -> Open:
    @asynccontextmanager
    async def open_(url: str | None = None, **pinned: Any) -> AsyncIterator[Scene]:
        engine = settings.engine.model_copy(update={"url": url or settings.engine.url})
        served = settings.model_copy(update={"engine": engine})
        async with data_plane(served, lambda _step: None) as plane:
            grant = SessionGrant("s", new_key(), tmp_path / "capture", SamplingPin(**pinned), Budgets())
            plane.gateway.open_session(grant)
            url = f"{plane.gateway.url}/v1"
            async with AsyncOpenAI(base_url=url, api_key=grant.key, max_retries=0) as client:
                yield Scene(plane.gateway, grant, client, plane.model.name)

    return open_
