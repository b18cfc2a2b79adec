"""The real small model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_model
from polar.rendering.chatml import ChatML


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def chatml(model_directory: Path) -> ChatML:
    return ChatML(model_directory / "tokenizer.json")
