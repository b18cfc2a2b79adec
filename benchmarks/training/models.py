"""Models to measure with: random weights, where only their shape matters."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

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
"""Of the small model."""
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


def default_shape(into: Path) -> Path:
    """The default model's shape: as fast as with its weights, which need not be there."""
    return _write(into, DEFAULT)


def small_model(into: Path) -> Path:
    """One thin layer and a small vocabulary: what a CPU trains in seconds."""
    return _write(into, SMALL)


def _write(into: Path, shape: dict[str, object]) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(into)
    return into
