"""A tokenizer whose tokens are characters, and which keeps what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Encoding:
    ids: list[int]


@dataclass
class CountingTokenizer:
    asked: list[str] = field(default_factory=list)

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        assert not add_special_tokens
        self.asked.append(text)
        return Encoding([ord(character) for character in text])

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[Encoding]:
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]
