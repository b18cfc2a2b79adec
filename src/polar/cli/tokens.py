"""The tokenizer that `polar show` reads tokens with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polar.engines.vocabulary import local_tokenizer
from polar.errors import InvalidInput

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def find_tokenizer(model: str | None, given: Path | None = None) -> Tokenizer | None:
    """The tokenizer at `given`, else the model's own if it can be had without a download."""
    from tokenizers import Tokenizer

    path = _given_file(given) if given is not None else local_tokenizer(model)
    if path is None:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception on a malformed file
        raise InvalidInput(f"{path}: not a tokenizer: {error}") from None


def _given_file(given: Path) -> Path:
    path = given / "tokenizer.json" if given.is_dir() else given
    if not path.is_file():
        raise InvalidInput(
            f"--tokenizer: {path} does not exist", hint="name a tokenizer.json or its directory"
        )
    return path
