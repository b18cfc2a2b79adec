"""Cuts streamed text at the first stop string, which the client never sees."""

from __future__ import annotations


class StopStrings:
    """Holds back what may be the beginning of a stop string until it is certain."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def feed(self, text: str) -> str:
        """What of the text so far may be shown."""
        if not self._stops or self.hit:
            return "" if self.hit else text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            first, self.matched = min(found)
            shown, self._held = self._held[:first], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
