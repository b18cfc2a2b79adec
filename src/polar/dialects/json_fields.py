"""Reads provider JSON by hand; every error names the field as the client wrote it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Self, TypeVar

import orjson

from polar.dialects.base import Refusal, RequestRefused

T = TypeVar("T")
F = TypeVar("F", bound="Fields")

_MEMOIZED_VALUES = 32
_LONGEST_MEMOIZED = 128 * 1024
"""A limit in bytes, so that no client decides how much memory memoized values take."""
_OMITTED = frozenset({"image", "audio", "video", "file", "document"})
"""Kinds of omitted content that are counted by name; all others count as `other`."""
_LONGEST_KIND = 32


def malformed(field: str | None, message: str) -> RequestRefused:
    return RequestRefused(
        Refusal.MALFORMED, f"{field}: {message}" if field is not None else message, field=field
    )


def document(body: bytes, read_as: type[F]) -> F:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _with_lone_surrogates(body, str(error))
    if not isinstance(value, dict):
        raise malformed(None, "the request body must be a JSON object")
    try:
        # Parts of it are encoded again, a few levels deeper.
        orjson.dumps([[[[value]]]])
    except orjson.JSONEncodeError:
        raise malformed(None, "the request body is nested too deeply") from None
    return read_as(value)


def _with_lone_surrogates(body: bytes, reason: str) -> Any:
    """Parse JSON in which JavaScript cut a surrogate pair; the half becomes a question mark."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        return orjson.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise malformed(None, f"the request body is not valid JSON: {reason}") from None


class Fields:
    """A JSON object and its place in the body; absent and null fields are the same."""

    __slots__ = ("_index", "_name", "_parent", "_value", "omitted")

    def __init__(
        self, value: dict[str, Any], parent: Fields | None = None, name: str = "", index: int | None = None
    ) -> None:
        self._value = value
        self._parent = parent
        self._name = name
        self._index = index
        self.omitted: Counter[str] = Counter() if parent is None else parent.omitted
        """The content omitted from the whole body so far, counted by kind."""

    @property
    def path(self) -> str:
        """The path of this object in the body, computed on demand, since only errors need it."""
        if self._parent is None:
            return ""
        at = self._parent.at(self._name)
        return at if self._index is None else f"{at}[{self._index}]"

    def at(self, name: str) -> str:
        path = self.path
        return f"{path}.{name}" if path else name

    def get(self, name: str) -> Any:
        return self._value.get(name)

    def placeholder(self, kind: str) -> str:
        """Return the text that stands for content the model cannot read, and count it by kind."""
        self.omitted[kind if kind in _OMITTED else "other"] += 1
        name = kind if kind.isidentifier() and len(kind) <= _LONGEST_KIND else "content"
        return f"[{name} omitted: this model reads only text]"

    def string(self, name: str) -> str | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, str):
            raise malformed(self.at(name), f"must be a string, not {kind(value)}")
        return value

    def needed_string(self, name: str) -> str:
        value = self.string(name)
        if value is None:
            raise malformed(self.at(name), "is required and must be a string")
        return value

    def name(self) -> str:
        """Return the name of this object, which describes a tool."""
        name = self.needed_string("name")
        if not name:
            raise malformed(self.at("name"), "must not be empty")
        return name

    def one_of(self, name: str, meanings: Mapping[str, T]) -> T:
        """Return the meaning of a string that must be one of the keys of `meanings`."""
        word = self.needed_string(name)
        if word not in meanings:
            raise malformed(self.at(name), f"must be one of {', '.join(meanings)}, not {word!r}")
        return meanings[word]

    def strings(self, name: str, what: str = "an array of strings") -> list[str]:
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise malformed(self.at(name), f"must be {what}")
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._value.get(name)
        if value is not None and not isinstance(value, bool):
            raise malformed(self.at(name), f"must be true or false, not {kind(value)}")
        return default if value is None else value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise malformed(self.at(name), f"must be a number, not {kind(value)}")
        if not low <= value <= high:
            raise malformed(self.at(name), f"must be between {low:g} and {high:g}, not {value}")
        return float(value)

    def integer(self, name: str, low: int, high: int = 2**63 - 1) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise malformed(self.at(name), f"must be an integer, not {kind(value)}")
        if not low <= value <= high:
            raise malformed(
                self.at(name), f"must be at least {low}, not {value}" if value < low else "too large"
            )
        return value

    def child(self, name: str) -> Self | None:
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise malformed(self.at(name), f"must be an object, not {kind(value)}")
        return type(self)(value, self, name)

    def needed_child(self, name: str) -> Self:
        child = self.child(name)
        if child is None:
            raise malformed(self.at(name), "is required and must be an object")
        return child

    def children(self, name: str) -> list[Self]:
        """Return the objects of an array; none if it is absent."""
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise malformed(self.at(name), f"must be an array, not {kind(value)}")
        for index, item in enumerate(value):
            if not isinstance(item, dict):
                raise malformed(f"{self.at(name)}[{index}]", f"must be an object, not {kind(item)}")
        return [type(self)(item, self, name, index) for index, item in enumerate(value)]


def memoized(read_as: type[F], *names: str) -> Callable[[Callable[[F], T]], Callable[[F], T]]:
    """Decorate a reader of these fields: each value, such as the tools of a harness, is read once."""

    def decorate(read: Callable[[F], T]) -> Callable[[F], T]:
        known = lru_cache(_MEMOIZED_VALUES)(lambda text: read(read_as(orjson.loads(text))))

        def read_once(fields: F) -> T:
            text = orjson.dumps({name: fields.get(name) for name in names})
            return known(text) if len(text) <= _LONGEST_MEMOIZED else read(fields)

        return read_once

    return decorate


def kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"
