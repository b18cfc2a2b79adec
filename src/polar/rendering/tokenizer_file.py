"""A model's tokenizer from its file, without limits that somebody else left there.

A tokenizer is saved with the truncation and padding of its last use, which is often a fine-tuning. Left
in force they would cut every long message of a prompt short, and nobody would be told.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    return unlimited(Tokenizer.from_file(str(file)))


def unlimited(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, which from now on neither cuts texts short nor fills them up."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
