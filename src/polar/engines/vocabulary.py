"""Token ids as text: where a model's tokenizer lies on this machine, and texts as their tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer


def local_tokenizer(model: str | None) -> Path | None:
    """The file of the model's tokenizer, if it can be had without a download."""
    from polar.config.settings import DEFAULT_MODEL, cache_dir
    from polar.engines.embedded.weights import REVISION

    if model is None:
        return None
    candidates = [Path(model).expanduser() / "tokenizer.json"]
    if model == DEFAULT_MODEL:
        candidates.append(cache_dir() / "models" / f"{DEFAULT_MODEL}-{REVISION}" / "tokenizer.json")
    elif model.count("/") == 1 and not model.startswith(("/", ".", "~")):
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, "tokenizer.json")
        if isinstance(cached, str):
            candidates.append(Path(cached))
    return next((path for path in candidates if path.is_file()), None)


class Text:
    """Decodes a text as its tokens arrive; a character split over tokens belongs to the last one."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = False) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._fresh = partial(DecodeStream, skip_special_tokens=skip_special_tokens)
        self._stream = self._fresh()

    def add(self, id: int) -> str:
        """Return the text that the next token adds."""
        try:
            return self._stream.step(self._tokenizer, id) or ""
        except Exception:
            # Nothing more special is raised when bytes that never became a character change how those
            # before them read. The stream would raise it every time.
            self._stream = self._fresh()
            return "\N{REPLACEMENT CHARACTER}" + (self._stream.step(self._tokenizer, id) or "")


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token."""
    text = Text(tokenizer)
    texts = [text.add(int(token)) for token in ids]
    if texts and not texts[-1]:
        # The sequence ends inside a character: show that there is something.
        texts[-1] = "\N{REPLACEMENT CHARACTER}"
    return texts


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
        """Take the next id; return the text that is now certain."""
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
        """End the response; return the text still held back."""
        rest, self._held = self._held, ""
        return rest

    def _hold_length(self) -> int:
        """Length of the longest suffix of the held text that begins a stop string."""
        for length in range(min(self._hold, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0
