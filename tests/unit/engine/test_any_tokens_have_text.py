"""Whatever is sampled has a text, also bytes that are no characters, where a tokenizer falls back to them."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from polar.engines.vocabulary import Detokenizer, pieces

LETTERS = {letter: 256 + at for at, letter in enumerate("abc")}
E_ACUTE, BEGUN = [0xC3, 0xA9], [0xE0]
"""A character of two bytes, and the first byte of one of three."""


def _tokenizer() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | LETTERS
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return made


TOKENIZER = _tokenizer()
IDS = st.lists(st.sampled_from([*E_ACUTE, *BEGUN, *LETTERS.values()]), max_size=12)


@given(IDS)
@example([*E_ACUTE, *BEGUN, 256, 256])
def test_no_sequence_of_tokens_ends_the_decoding(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    text = "".join([*(detokenizer.feed(id) for id in ids), detokenizer.finish()])
    letters = [letter for letter in text if letter in LETTERS]
    assert letters == [chr(ord("a") + id - 256) for id in ids if id >= 256]
    assert len(pieces(TOKENIZER, ids)) == len(ids)


@given(st.text("abcé東🙂", max_size=12))
def test_characters_are_told_as_they_are(text: str) -> None:
    ids = TOKENIZER.encode(text).ids
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join([*(detokenizer.feed(id) for id in ids), detokenizer.finish()]) == text
    assert "".join(pieces(TOKENIZER, ids)) == text
