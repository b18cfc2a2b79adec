"""A random Llama of a few hundred thousand weights, with a tokenizer of one token a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 256


def write_tiny_llama(directory: Path, **config: Any) -> Path:
    """Write configuration, weights and tokenizer as save_pretrained does; the seed is fixed."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)

    torch.manual_seed(0)
    shape = {
        "vocab_size": len(alphabet) + 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "eos_token_id": len(alphabet) + 1,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    LlamaForCausalLM(LlamaConfig(**{**shape, **config})).save_pretrained(directory)
    return directory


def write_adapter(directory: Path) -> Path:
    """A LoRA adapter of one layer for it, another one each time."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(4, 64, dtype=torch.bfloat16),
        f"{prefix}.lora_B.weight": torch.randn(64, 4, dtype=torch.bfloat16),
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
