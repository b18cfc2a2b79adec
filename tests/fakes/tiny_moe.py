"""A mixture of experts with random weights, small enough for every test, that routes as large ones do.

    python -m tests.fakes.tiny_moe DIRECTORY --like MODEL

writes one with the tokenizer and chat template of another model: what suites/gpu/vllm serves.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from polar.models.completion import Routing
from polar.training.routing import routers

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges*")
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}
SERVED: dict[str, Any] = SMALL | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.07,
}
"""In dimensions that the kernels of GPUs are made for."""


def write_tiny_moe(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Weights are larger than models begin with, so that experts and tokens differ."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**({"initializer_range": 0.3} | SMALL | changes))
    Qwen3MoeForCausalLM(config).to(dtype).save_pretrained(directory)
    return directory


def write_tiny_moe_like(directory: Path, model: Path) -> Path:
    """With the tokens of another model and no others, in bfloat16."""
    read = {name: json.loads((model / f"{name}.json").read_text()) for name in ("config", "tokenizer")}
    named = read["tokenizer"]["model"]["vocab"].values()
    added = (token["id"] for token in read["tokenizer"]["added_tokens"])
    same = {name: read["config"].get(name) for name in ("bos_token_id", "eos_token_id")}
    vocabulary = max((*named, *added)) + 1
    write_tiny_moe(directory, dtype=torch.bfloat16, **(SERVED | same | {"vocab_size": vocabulary}))
    for pattern in TOKENIZER_FILES:
        for file in model.glob(pattern):
            shutil.copy(file, directory)
    return directory


class NoisySampler:
    """An engine whose routers round otherwise: it keeps the experts that it chose."""

    def __init__(self, directory: Path, noise: float, seed: int = 3) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._noise = noise
        self._random = torch.Generator().manual_seed(seed)
        self._chosen: list[torch.Tensor] = []
        for router in routers(self._model):
            router.module.register_forward_hook(self._choose)

    def _choose(self, router: Any, _inputs: Any, made: Any) -> Any:
        logits = made[0]
        shaken = logits + self._noise * torch.randn(logits.shape, generator=self._random)
        chosen = shaken.topk(router.top_k).indices
        weights = logits.softmax(-1).gather(-1, chosen)
        self._chosen.append(chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    def score(self, ids: list[int]) -> tuple[np.ndarray[Any, Any], Routing]:
        """The logprob of each token but the first, and the experts of all."""
        self._chosen.clear()
        with torch.no_grad():
            logits = self._model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        chosen = torch.stack(self._chosen, 1).numpy()
        return logprobs.numpy(), chosen.astype(np.uint8 if chosen.max() < 256 else np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--like", type=Path, required=True, help="a model's directory")
    asked = parser.parse_args()
    print(write_tiny_moe_like(asked.directory, asked.like))


if __name__ == "__main__":
    main()
