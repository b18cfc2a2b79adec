"""Least recently used, with an age limit."""

import time
from collections import OrderedDict

_MISSING = object()


class Cache:
    """Holds up to `size` values, each for up to `ttl` seconds (None: for ever)."""

    def __init__(self, size, ttl=None, clock=time.monotonic):
        if size < 1:
            raise ValueError("size must be at least 1")
        self._size = size
        self._ttl = ttl
        self._clock = clock
        self._values = OrderedDict()
        self._expiry = {}

    def __len__(self):
        self._drop_expired()
        return len(self._values)

    def __contains__(self, key):
        return self._fresh(key)

    def get(self, key, default=None):
        """The value of a key; asking for it counts as using it."""
        if not self._fresh(key):
            return default
        return self._values[key]

    def set(self, key, value):
        """Keep a value; the least recently used one makes room for it."""
        if key in self._values:
            self._values.move_to_end(key)
        elif len(self) >= self._size:
            oldest, _ = self._values.popitem(last=False)
            self._expiry.pop(oldest, None)
        self._values[key] = value
        if self._ttl is not None:
            self._expiry[key] = self._clock() + self._ttl

    def pop(self, key, default=_MISSING):
        fresh = self._fresh(key)
        value = self._values.pop(key, default)
        self._expiry.pop(key, None)
        if not fresh:
            value = default
        if value is _MISSING:
            raise KeyError(key)
        return value

    def _fresh(self, key):
        if key not in self._values:
            return False
        return self._ttl is None or self._clock() < self._expiry[key]

    def _drop_expired(self):
        for key in [key for key in self._values if not self._fresh(key)]:
            del self._values[key]
            self._expiry.pop(key, None)
