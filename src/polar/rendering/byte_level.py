"""Token ids → text for byte-level BPE vocabularies, never emitting half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tokenizers import Tokenizer


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + offset): byte for offset, byte in enumerate(hidden)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


class Vocabulary:
    """What each id contributes to the text, in bytes; special tokens contribute none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._spelt = {id: token.content.encode() for id, token in added.items()}
        self._known = {id: b"" if token.special else self._spelt[id] for id, token in added.items()}

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._one, ids))

    def spelling(self, id: int) -> bytes:
        """What one id stands for; special tokens are spelt out."""
        return self._spelt.get(id) or self._one(id)

    def _one(self, id: int) -> bytes:
        known = self._known.get(id)
        if known is None:
            # Embeddings are often padded beyond the vocabulary: such an id has no text.
            token = self._tokenizer.id_to_token(id) or ""
            known = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            self._known[id] = known
        return known


class TextStream:
    """Decodes ids as they arrive; an incomplete character waits for its remaining bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
