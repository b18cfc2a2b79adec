"""A model's tokenizer from its file, what its ids stand for, and the ids of texts that come again.

A tokenizer is saved with the truncation and padding of its last use, which is often a fine-tuning. Left
in force they would cut every long message of a prompt short, and nobody would be told.

A harness sends the same system prompt and tools in every session. Templates are tokenised piece by piece,
between control tokens that no merge crosses; the ids of a piece depend on its text alone, so keeping them by
that text is exact for every family.
"""

from __future__ import annotations

import codecs
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Lock

import numpy as np
from tokenizers import Tokenizer

from polar.models.completion import Ids


def read_tokenizer(file: Path) -> Tokenizer:
    return unlimited(Tokenizer.from_file(str(file)))


def unlimited(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer, which from now on neither cuts texts short nor fills them up."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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


_WORTH_KEEPING = 512
"""Characters; shorter texts are tokenised as fast as they are found."""
_ROOM = 16 * 1024 * 1024
"""Characters kept at most: with their ids about 32 MB of plain text."""
_SEEN = 65_536
"""How many texts are known to have come once."""


class KeptTexts:
    """Tokenises texts; long ones that come a second time are kept, the latest used longest.

    What comes once, such as the result of a tool, is not kept: it would push out what comes again.
    """

    def __init__(self, encode: Callable[[str], list[int]], room: int = _ROOM) -> None:
        self._encode = encode
        self._room = room
        self._used = 0
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = Lock()  # prompts are rendered in several threads

    def ids(self, text: str) -> list[int]:
        if len(text) < _WORTH_KEEPING:
            return self._encode(text)
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
        if kept is not None:
            found: list[int] = kept.tolist()
            return found
        ids = self._encode(text)
        with self._lock:
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: list[int]) -> None:
        mark = hash(text)
        if mark not in self._seen:
            self._seen[mark] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            return
        if text in self._kept or len(text) > self._room:
            return
        self._kept[text] = np.array(ids, np.int32)
        self._used += len(text)
        while self._used > self._room:
            dropped, _ = self._kept.popitem(last=False)
            self._used -= len(dropped)
