"""Reads provider JSON by hand; every complaint names the field as the client wrote it."""

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

_REMEMBERED = 32
"""How many different values of a field are remembered."""
_LONGEST_REMEMBERED = 128 * 1024
"""Bytes of JSON; a longer value is read every time, so that no client decides how much memory this takes."""
_OMITTED = frozenset({"image", "audio", "video", "file", "document"})
"""What requests hold besides text, as it is counted; all else is counted as `other`."""
_LONGEST_KIND = 32


def malformed(field: str | None, message: str) -> RequestRefused:
    return RequestRefused(
        Refusal.MALFORMED, f"{field}: {message}" if field is not None else message, field=field
    )


def document(body: bytes, read_as: type[F]) -> F:
    """The body's JSON object."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _with_lone_surrogates(body, str(error))
    if not isinstance(value, dict):
        raise malformed(None, "the request body must be a JSON object")
    try:
        # Parts of it are written again, with a few levels of their own around them.
        orjson.dumps([[[[value]]]])
    except orjson.JSONEncodeError:
        raise malformed(None, "the request body is nested too deeply") from None
    return read_as(value)


def _with_lone_surrogates(body: bytes, reason: str) -> Any:
    """JavaScript cuts strings inside a character and escapes the half; it becomes a question mark."""
    try:
        text = json.dumps(json.loads(body), ensure_ascii=False)
        return orjson.loads(text.encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        raise malformed(None, f"the request body is not valid JSON: {reason}") from None


class Fields:
    """A JSON object and where it stands in the body. Absent and null are the same."""

    __slots__ = ("_index", "_name", "_parent", "_value", "omitted")

    def __init__(
        self, value: dict[str, Any], parent: Fields | None = None, name: str = "", index: int | None = None
    ) -> None:
        self._value = value
        self._parent = parent
        self._name = name
        self._index = index
        self.omitted: Counter[str] = Counter() if parent is None else parent.omitted
        """What of the whole body was left out of the text so far, by kind."""

    @property
    def path(self) -> str:
        """Put together when it is asked for: only complaints need it."""
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
        """What the model reads in the place of this part, which is no text; counted by its kind."""
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
        """What this object, a tool, is called."""
        name = self.needed_string("name")
        if not name:
            raise malformed(self.at("name"), "must not be empty")
        return name

    def one_of(self, name: str, meanings: Mapping[str, T]) -> T:
        """What a string that must be one of some words means."""
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
        """The objects of an array; none when it is absent."""
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
    """For what depends on these fields of a body alone: the same value of them is read once.

    A harness sends its tools with every request, and so do all other sessions of that harness.
    """

    def remembering(read: Callable[[F], T]) -> Callable[[F], T]:
        known = lru_cache(_REMEMBERED)(lambda text: read(read_as(orjson.loads(text))))

        def reading(fields: F) -> T:
            text = orjson.dumps({name: fields.get(name) for name in names})
            return known(text) if len(text) <= _LONGEST_REMEMBERED else read(fields)

        return reading

    return remembering


def kind(value: Any) -> str:
    """What JSON calls a value of this type."""
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
