"""A tiny random model, for runs of several processes on one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))
