"""Sampled ids → text as it becomes certain, and the end at a stop string."""

from __future__ import annotations

from tokenizers import Tokenizer

from polar.engines.vocabulary import Text


class Detokenizer:
    """The text of one response. Text that may become part of a stop string is held back.

    Special tokens give no text. A matched stop string is not part of the text, as in vLLM; the
    tokens that make it up are part of the ids.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._text = Text(tokenizer, skip_special_tokens=True)
        self._stop = stop
        self._hold = max((len(text) - 1 for text in stop), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, token_id: int) -> str:
        """Take the next id and return the text that is certain now."""
        self._held += self._text.add(token_id)
        found = [(at, text) for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            at, self.matched = min(found)
            certain, self._held = self._held[:at], ""
            return certain
        keep = self._hold_length()
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def finish(self) -> str:
        """No more ids will come: the text still held back."""
        rest, self._held = self._held, ""
        return rest

    def _hold_length(self) -> int:
        """Length of the longest end of the held text that a stop string begins with."""
        for length in range(min(self._hold, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0
