"""A tiny model with the tokenizer of any family, which says in some places what it has been taught.

Its weights are random. Only the last layer is not: it is solved so that after each taught prompt the taught
turn follows token by token. After other prompts the model says anything.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "pad_token_id": None,
}
_LATENT_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
OTHER_SHAPES = {
    "deepseek_v3": _LATENT_EXPERTS,
    "mistral": {"sliding_window": None},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""What an architecture, as transformers calls it, needs beside the common shape."""
CERTAIN = 30.0
"""The logit of a taught token, where all others have about 0: it is always sampled."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A turn that is said after a prompt, in ids. All lessons together are shorter than the hidden size."""

    prompt: Sequence[int]
    turn: Sequence[int]


def write_taught_model(
    directory: Path, family: Path, architecture: str, stops: Sequence[int], lessons: Sequence[Lesson]
) -> Path:
    """Write a model with the tokenizer and template of a family's directory; the seed is fixed."""
    directory.mkdir()
    for file in family.iterdir():
        shutil.copy(file, directory)
    vocabulary = Tokenizer.from_file(str(family / "tokenizer.json")).get_vocab(with_added_tokens=True)
    size = {"vocab_size": max(vocabulary.values()) + 1, "eos_token_id": list(stops)}
    config = AutoConfig.for_model(architecture, **SHAPE | OTHER_SHAPES.get(architecture, {}) | size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    _teach(model, lessons)
    model.save_pretrained(directory)
    return directory


def _teach(model: Any, lessons: Sequence[Lesson]) -> None:
    """Solve the rows of taught tokens in the last layer, and make all others zero."""
    with torch.no_grad():
        states = torch.cat([_states(model, lesson) for lesson in lessons])
        said = torch.tensor([id for lesson in lessons for id in lesson.turn])
        tokens = said.unique()
        wanted = CERTAIN * (said[:, None] == tokens).to(states.dtype)
        head = model.get_output_embeddings().weight
        head.zero_()
        head[tokens] = torch.linalg.lstsq(states, wanted, driver="gelsd").solution.T.to(head.dtype)


def _states(model: Any, lesson: Lesson) -> torch.Tensor:
    """What the last layer sees where each token of the turn comes next."""
    ids = torch.tensor([[*lesson.prompt, *lesson.turn]])
    states: torch.Tensor = model.get_decoder()(ids, use_cache=False).last_hidden_state[0]
    return states[len(lesson.prompt) - 1 : -1].double()
