"""What makes two histories the same to the policy, however a harness re-serialised them."""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any

from polar.models.chat import Message, Role, ToolCall

Key = tuple[Role, str, tuple[tuple[str, str], ...]]

_BLANK = (
    string.whitespace
    + "\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"
    + "".join(map(chr, range(0x2000, 0x200B)))
)
"""What Python or JavaScript trims."""
_EXACT = 2**53
"""Beyond it JavaScript's numbers skip integers."""
_DAYS = "(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_MONTHS = (
    "(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    "|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_VOLATILE = re.compile(
    "|".join(
        (
            r"\d{4}-\d{2}-\d{2}(?:[T_ ]\d{2}[:-]\d{2}(?:[:-]\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?",
            r"\b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AP]M)?\b",
            rf"\b(?:{_DAYS},?\s+)?{_MONTHS}\s+\d{{1,2}}(?:,?\s+\d{{4}})?\b",
            rf"\b(?:{_DAYS},?\s+)?\d{{1,2}}\s+{_MONTHS}(?:,?\s+\d{{4}})?\b",
            rf"\b{_DAYS}\b",
            r"\b\d{1,2}/\d{1,2}/\d{4}\b",
            r"\b\d+(?:\.\d+)?\s?(?:ns|µs|us|ms|s|secs?|seconds?|mins?|minutes?)\b",
            r"\b\d{9,}(?:\.\d+)?\b",
            r"\b0x[0-9a-fA-F]+\b",
            r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
            r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{6,}\b",
            r"\btmp[._-]?\w{6,}",
            r"(?i:\b(?:id|pid)[ :=]+)[0-9a-f]+\b",
        )
    )
)
"""Times, durations, addresses and made-up names. Plain numbers are not: 3 failed tests are not 4."""


def key_of(message: Message) -> Key:
    """A message's identity.

    Not part of it: ids of tool calls (made up), reasoning (many harnesses drop it), spacing around an
    assistant's text (some trim it). What others wrote counts to the last byte: it was rendered.
    """
    if message.role is not Role.ASSISTANT:
        return message.role, message.content, ()
    calls = tuple((call.name, _arguments(call)) for call in message.tool_calls)
    return message.role, message.content.strip(_BLANK), calls


def alike(one: Message, other: Message) -> bool:
    """Whether two messages mean the same, as those of two runs do that differ in what no run has in common
    with another. What the assistant said must be the same."""
    if key_of(one) == key_of(other):
        return True
    if one.role is not other.role or one.role is Role.ASSISTANT:
        return False
    return _VOLATILE.sub("…", one.content) == _VOLATILE.sub("…", other.content)


def joined(messages: Sequence[Message]) -> Message:
    """One message of the assistant that was sent back as several."""
    return Message(
        Role.ASSISTANT,
        "".join(message.content for message in messages),
        tool_calls=tuple(call for message in messages for call in message.tool_calls),
    )


def in_call_order(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Results in the order of their calls: clients send them as they end, and few templates show ids."""
    are_results = [message.role is Role.TOOL for message in messages]
    if (True, True) not in pairwise(are_results):
        return messages
    ordered: list[Message] = []
    asking: list[Message] = []
    for role, group in groupby(messages, key=attrgetter("role")):
        together = list(group)
        if role is Role.ASSISTANT:
            asking = together
        elif role is Role.TOOL and len(together) > 1:
            places = _places(asking)
            together.sort(key=lambda result: places.get(result.tool_call_id or "", len(places)))
        ordered += together
    return tuple(ordered)


def _places(asking: Sequence[Message]) -> dict[str, int]:
    """Where the call of each id stands; empty if ids do not tell the calls apart."""
    ids = [call.id for message in asking for call in message.tool_calls]
    places = {id: place for place, id in enumerate(ids)}
    return places if len(places) == len(ids) else {}


def _arguments(call: ToolCall) -> str:
    """JSON in one spelling; what is no JSON stands for itself."""
    if not call.arguments.strip():
        return "{}"
    try:
        value = _plain(json.loads(call.arguments, strict=False))
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    except (ValueError, RecursionError):
        text = call.arguments
    # Half a surrogate pair travels as a question mark.
    return text.encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    """Values as they come back from JavaScript, which has one kind of number: 1.0 is 1 there."""
    match value:
        case bool():
            return value
        case int():
            return value if -_EXACT <= value <= _EXACT else _plain(_float(value))
        case float() if not math.isfinite(value):
            return None
        case float():
            return int(value) if value.is_integer() else value
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case _:
            return value


def _float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)
