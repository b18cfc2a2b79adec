"""Models to measure with: random weights, where only their shape matters."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

DEFAULT: dict[str, object] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
"""SmolLM2-135M, with positions for long prompts."""
VOCABULARY = 512
"""Of the small models."""
SMALL: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 131_072,
}
HYBRID: dict[str, object] = SMALL | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Three of four layers of linear attention, as Qwen3.5 has them."""


def default_shape(into: Path) -> Path:
    """The default model's shape: as fast as with its weights, which need not be there."""
    return _write(into, LlamaForCausalLM, LlamaConfig(**DEFAULT))


def small_model(into: Path) -> Path:
    """One thin layer and a small vocabulary: what a CPU trains in seconds."""
    return _write(into, LlamaForCausalLM, LlamaConfig(**SMALL))


def hybrid_model(into: Path) -> Path:
    """Four thin layers, three of them of linear attention."""
    return _write(into, Qwen3_5ForCausalLM, Qwen3_5TextConfig(**HYBRID))


def _write(into: Path, kind: type[PreTrainedModel], config: PretrainedConfig) -> Path:
    torch.manual_seed(0)
    kind(config).save_pretrained(into)
    return into
