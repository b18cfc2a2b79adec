"""The real small model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from polar.config.settings import DEFAULT_MODEL
from polar.engines.embedded.weights import ensure_model
from polar.rendering.adapter import AdaptedRenderer
from polar.rendering.families import renderer_for
from polar.rendering.template_renderer import TemplateRenderer
from tests.tokenizers_of_families import DEEPSEEK, LLAMA, QWEN3, Family


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return ensure_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def smollm2(model_directory: Path) -> TemplateRenderer:
    renderer = renderer_for("x", model_directory, tool_prompt=True)
    assert isinstance(renderer, TemplateRenderer)
    return renderer


def adapted(family: Family) -> AdaptedRenderer:
    renderer = renderer_for("x", family.directory(), family=family.name)
    assert isinstance(renderer, AdaptedRenderer)
    return renderer


@pytest.fixture(scope="session")
def qwen3_with_thoughts() -> AdaptedRenderer:
    renderer = renderer_for("x", QWEN3.directory(), family=QWEN3.name, keeps_thoughts=True)
    assert isinstance(renderer, AdaptedRenderer)
    return renderer


@pytest.fixture(scope="session")
def qwen3() -> AdaptedRenderer:
    return adapted(QWEN3)


@pytest.fixture(scope="session")
def llama() -> AdaptedRenderer:
    return adapted(LLAMA)


@pytest.fixture(scope="session")
def deepseek() -> AdaptedRenderer:
    return adapted(DEEPSEEK)


@pytest.fixture(scope="session", params=["qwen3", "llama", "deepseek"])
def family(request: pytest.FixtureRequest) -> AdaptedRenderer:
    """Each of the families in turn, with its real tokenizer."""
    renderer: AdaptedRenderer = request.getfixturevalue(request.param)
    return renderer
