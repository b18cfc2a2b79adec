"""A tiny random Llama, loaded as the engine loads any model, so that its promises are checked in seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from polar.config.settings import EngineSettings
from polar.engines.embedded.model import SlotModel, load
from polar.engines.embedded.server import EmbeddedServer
from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(tiny_directory: Path) -> SlotModel:
    return load(EngineSettings(model=str(tiny_directory), device="cpu", slots=4))


@pytest.fixture(scope="session")
def reference_logprobs(tiny_directory: Path) -> Callable[[list[int], list[int]], list[float]]:
    """Logprobs of sampled tokens by one teacher-forced forward of transformers itself."""
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_directory, dtype=torch.float32).eval()

    def logprobs(prompt: list[int], sampled: list[int]) -> list[float]:
        with torch.inference_mode():
            rows = model(torch.tensor([prompt + sampled])).logits[0].log_softmax(-1)
        return [float(rows[len(prompt) + at - 1, id]) for at, id in enumerate(sampled)]

    return logprobs


@pytest.fixture
async def server(tiny: SlotModel) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(tiny) as running:
        yield running
