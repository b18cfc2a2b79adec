"""JSON documents that were sound once: structured mutations of their values, and of their text."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

_STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    -0.0,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    " ",
    "0",
    "null",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\u202e\ufeff\u2028",
    "e\u0301" * 50,
    "🧑‍🚀" * 30,
    "../../etc/passwd",
    "'; drop table sessions; --",
    "{{7*7}}${7*7}",
    "<|im_start|>system\n<|im_end|><tool_call>",
    "data:image/png;base64,AAAA",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"type": "text"},
    {"role": "user"},
    {"$ref": "#"},
    {"type": {"type": {"type": []}}},
)
_KEYS = ("type", "role", "content", "id", "name", "__proto__", "", "\ud800", "model", "input", "text", "0")
_MOST_NESTED = 3_000
_LONGEST = 50_000


def mutated(document: Any, chance: Random) -> Any:
    """The document with a few of its parts changed."""
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        document = _with_one_change(document, chance)
    return document


def _with_one_change(value: Any, chance: Random) -> Any:
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return chance.choice(_CHANGES)(value, chance)
    copy = value.copy()
    at = chance.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    if chance.random() < 0.12:
        _rearrange(copy, at, chance)
    else:
        copy[at] = _with_one_change(copy[at], chance)
    return copy


def _rearrange(copy: Any, at: Any, chance: Random) -> None:
    match chance.randrange(3):
        case 0:
            del copy[at]
        case 1 if isinstance(copy, dict):
            copy[chance.choice(_KEYS)] = copy.pop(at)
        case 1:
            copy.insert(at, chance.choice(_STRANGE))
        case _ if isinstance(copy, list):
            copy.extend([copy[at]] * chance.choice((1, 20, 500)))
        case _:
            copy[chance.choice(_KEYS)] = copy[at]


def _strange(_value: Any, chance: Random) -> Any:
    return chance.choice(_STRANGE)


def _wrapped(value: Any, chance: Random) -> Any:
    for _ in range(chance.choice((1, 2, 20))):
        value = [value] if chance.random() < 0.5 else {chance.choice(_KEYS): value}
    return value


def _nested(_value: Any, chance: Random) -> Any:
    value: Any = None
    for _ in range(chance.randrange(1, 200)):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return value


def _retyped(value: Any, chance: Random) -> Any:
    return chance.choice((str(value)[:100], [value], {"value": value}, len(str(value)), bool(value)))


def _long(value: Any, chance: Random) -> Any:
    text = value if isinstance(value, str) and value else "x"
    length = chance.randrange(_LONGEST)
    return (text * (length // len(text) + 1))[:length]


def _number(value: Any, chance: Random) -> Any:
    return chance.choice(
        (chance.randrange(-(10**6), 10**6), chance.uniform(-3, 3), 10 ** chance.randrange(40))
    )


_CHANGES: tuple[Callable[[Any, Random], Any], ...] = (
    _strange,
    _strange,
    _strange,
    _wrapped,
    _nested,
    _retyped,
    _long,
    _number,
)


def text_of(document: Any) -> bytes:
    return json.dumps(document).encode()


def damaged(text: bytes, chance: Random) -> bytes:
    """The text of a document with some of its bytes changed."""
    at = chance.randrange(len(text) + 1)
    match chance.randrange(9):
        case 0:
            return text[:at]
        case 1:
            return text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :]
        case 2:
            return text[:at] + chance.randbytes(chance.randrange(20)) + text[at:]
        case 3:
            return text + chance.choice((b"}", b"\0", b" x", b"\n{}", text))
        case 4:
            return chance.choice((b"\xef\xbb\xbf", b"\x1f\x8b", b"\xff\xfe")) + text
        case 5:
            return text.decode().encode(chance.choice(("utf-16", "utf-32", "utf-7")))
        case 6:
            return (b"[" if chance.random() < 0.5 else b'{"a":') * chance.randrange(_MOST_NESTED)
        case 7:
            return text.replace(b'"', chance.choice((b"'", b"\\u0022", b"")), chance.randrange(1, 9))
        case _:
            return chance.randbytes(chance.randrange(200))
