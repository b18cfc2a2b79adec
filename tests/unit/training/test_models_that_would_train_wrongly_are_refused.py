"""A model that packed batches or chunked logits would compute otherwise is refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar.errors import InvalidInput
from polar.training.policy import load_policy
from polar.training.settings import ModelSettings

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write(directory: Path, config: Any) -> ModelSettings:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return ModelSettings(name=str(directory), device="cpu")


def test_logits_that_are_scaled_after_the_last_layer_are_refused(tmp_path: Path) -> None:
    from transformers import GraniteConfig

    load_policy(write(tmp_path / "plain", GraniteConfig(**SHAPE, logits_scaling=1.0)))
    with pytest.raises(InvalidInput, match="scaled or capped"):
        load_policy(write(tmp_path / "scaled", GraniteConfig(**SHAPE, logits_scaling=8.0)))


def test_windows_shorter_than_a_batch_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    window = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    settings = write(tmp_path, Qwen2Config(**SHAPE, **window))
    load_policy(settings, most_tokens=32)
    with pytest.raises(InvalidInput, match="sliding_attention"):
        load_policy(settings, most_tokens=33)


def test_an_adapter_in_the_place_of_a_model_is_explained(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="holds no model"):
        load_policy(ModelSettings(name=str(tiny_model), start=tmp_path, device="cpu"))
    lora = ModelSettings.model_validate(
        {"name": str(tiny_model), "start": tmp_path, "lora": {}, "device": "cpu"}
    )
    with pytest.raises(InvalidInput, match="holds no adapter"):
        load_policy(lora)
