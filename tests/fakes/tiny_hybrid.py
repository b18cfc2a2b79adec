"""Models of linear and full attention with random weights, small enough for every test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {},
    "Qwen3_5MoeText": EXPERTS,
    "Qwen3Next": EXPERTS,
    "OlmoHybrid": {"linear_num_value_heads": 2, "linear_value_head_dim": 4},
}
"""Configurations by family, with what differs from the shape above."""


def write_tiny_hybrid(directory: Path, family: str = "Qwen3_5Text", **changes: Any) -> Path:
    """Write weights that are larger than models begin with, so that tokens differ."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SHAPE | FAMILIES[family] | changes)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    model.save_pretrained(directory)
    return directory
