"""A model's tokenizer from its file, what its ids stand for, and the ids of a template's text.

A tokenizer is saved with the truncation and padding of its last use, which is often a fine-tuning. Left
in force they would silently truncate every long message of a prompt.

A harness sends the same system prompt and tools in every session. Templates are tokenised piece by piece,
between control tokens that no merge crosses; the ids of a piece depend on its text alone, so keeping them by
that text is exact for every family.
"""

from __future__ import annotations

import codecs
import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock

import numpy as np
from tokenizers import Tokenizer

from polar.models.completion import Ids


def read_tokenizer(file: Path) -> Tokenizer:
    return remove_limits(Tokenizer.from_file(str(file)))


def remove_limits(tokenizer: Tokenizer) -> Tokenizer:
    """Remove the truncation and padding that a tokenizer file may have."""
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
_BYTE = re.compile("<0x([0-9A-F]{2})>")


def is_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in repr(tokenizer.decoder)


def is_spelt_in_words(tokenizer: Tokenizer) -> bool:
    """Whether ids are words with marked spaces; otherwise single bytes, as in SentencePiece."""
    return "ByteFallback" in repr(tokenizer.decoder)


class Vocabulary:
    """The bytes that each id contributes to a text; special tokens contribute none, except those in
    `spelt`."""

    def __init__(self, tokenizer: Tokenizer, spelt: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._in_words = is_spelt_in_words(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._spelt = {
            id: token.content.encode() if token.special or not self._in_words else _of_words(token.content)
            for id, token in added.items()
        }
        self._known = {
            id: b"" if token.special and token.content not in spelt else self._spelt[id]
            for id, token in added.items()
        }

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._one, ids))

    def spelling(self, id: int) -> bytes:
        """The bytes of one id, with special tokens spelled out."""
        return self._spelt.get(id) or self._one(id)

    def _one(self, id: int) -> bytes:
        known = self._known.get(id)
        if known is None:
            # Embeddings are often padded beyond the vocabulary: such an id has no text.
            token = self._tokenizer.id_to_token(id) or ""
            known = _of_words(token) if self._in_words else _of_byte_level(token)
            self._known[id] = known
        return known


def _of_byte_level(token: str) -> bytes:
    return bytes(_BYTE_OF_CHARACTER[character] for character in token)


def _of_words(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


class TextStream:
    """Decodes ids as they arrive; an incomplete character waits for its remaining bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(self._vocabulary.bytes_of(ids))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


_SHORT = 32
"""Maximum characters of texts such as stand between the messages of a template, over and over."""
_SHORT_TEXTS = 1_024
"""Number of short texts that are cached."""
_WORTH_KEEPING = 512
"""Minimum characters to cache of other texts, whose ids take longer to copy."""
_ROOM = 16 * 1024 * 1024
"""Maximum cached characters: with their ids about 32 MB of plain text."""
_SEEN = 65_536
"""Number of texts remembered as seen once."""


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


class KeptTexts:
    """Tokenises texts, and caches long ones when seen again, evicting the least recently used.

    Texts seen once, such as tool results, are not cached: they would evict recurring ones.
    """

    def __init__(self, tokenizer: Tokenizer, room: int = _ROOM) -> None:
        self._tokenizer = tokenizer
        self._short = lru_cache(_SHORT_TEXTS)(partial(_ids, tokenizer))
        self._room = room
        self._used = 0
        self._kept: OrderedDict[str, Ids] = OrderedDict()
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._lock = Lock()  # prompts are rendered in several threads

    def ids(self, text: str) -> list[int]:
        return self.of_all([text])[0]

    def of_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise every text."""
        found = [self._known(text) for text in texts]
        new = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        encoded = iter(self._encode(new))
        return [ids if ids is not None else next(encoded) for ids in found]

    def _known(self, text: str) -> list[int] | None:
        if len(text) <= _SHORT:
            return list(self._short(text))
        if len(text) < _WORTH_KEEPING:
            return None
        with self._lock:
            kept = self._kept.get(text)
            if kept is None:
                return None
            self._kept.move_to_end(text)
        ids: list[int] = kept.tolist()
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if len(texts) == 1 or sum(map(len, texts)) < _WORTH_KEEPING:
            # Short ones sooner than the tokenizer's other threads would begin with them.
            encoded = [_ids(self._tokenizer, text) for text in texts]
        else:
            # Without offsets, which are not used and take a fifth of the time.
            made = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            encoded = [each.ids for each in made]
        with self._lock:
            for text, ids in zip(texts, encoded, strict=True):
                if len(text) >= _WORTH_KEEPING:
                    self._remember(text, ids)
        return encoded

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


class TemplateText:
    """Tokenises a template's text: control tokens by id, everything between them as text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().items()
        self._control = {token.content: (id, token) for id, token in added if token.special}
        longest_first = sorted(self._control, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        """Matches any control token."""
        self._kept = KeptTexts(tokenizer)

    def ids(self, text: str, hiding: str = "") -> list[int]:
        """The ids of a text; `hiding` marks text that spells a control token but is not one."""
        pieces: list[str] = []
        controls: list[int] = []
        rest = 0
        for match in self.control.finditer(text):
            id, token = self._control[match[0]]
            before = text[rest : match.start()]
            pieces.append(before.rstrip() if token.lstrip else before)
            controls.append(id)
            rest = match.end()
            if token.rstrip:
                rest += len(text[rest:]) - len(text[rest:].lstrip())
        pieces.append(text[rest:])
        if hiding:
            pieces = [piece.replace(hiding, "") for piece in pieces]
        first, *others = self._kept.of_all(pieces)
        for id, ids in zip(controls, others, strict=True):
            first.append(id)
            first += ids
        return first


class RawText:
    """Tokenises raw texts as engines do: with control tokens, and the tokenizer's prefix."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = TemplateText(tokenizer)
        plain, whole = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (False, True))
        self._beginning: list[int] = whole[: whole.index(plain[0])] if plain else []

    def ids(self, text: str) -> list[int]:
        ids = self._text.ids(text)
        has_beginning = ids[: len(self._beginning)] == self._beginning
        return ids if has_beginning else self._beginning + ids

    def has(self, id: int) -> bool:
        """Whether the token exists."""
        return self._tokenizer.id_to_token(id) is not None
