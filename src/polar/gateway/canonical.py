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
_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = r"\d{2}:\d{2}:\d{2}(?:[.,]\d+)?"
_MEASURED = (
    r"(?:\d+m\s?)?"
    r"(?:\d+\.\d+\s?(?:s|secs?|seconds?|mins?|minutes?|[nuµm]s)|\d+\s?(?:[nuµm]s|milliseconds?))\b"
)
"""A duration that somebody measured: people and settings say `5 s` or `900 s`."""
_END = r'(?=(?:"|\\n)?$)'
_VARYING = tuple(
    re.compile(rf"({before}){varying}{after}", re.IGNORECASE)
    for before, varying, after in (
        (r"\b(?:wall time|took|elapsed|duration|time|in)\b\s?[:=]?\s*", _MEASURED, ""),
        (r"^(?:real|user|sys)\s+", _MEASURED, _END),
        (r"[(\[]", _MEASURED, r"(?=[)\]]\W*(?:\\n)?$)"),
        (r"^ok\s+\S+\s+", _MEASURED, _END),
        # ls -l
        (
            r"^[-a-z](?:[-r][-w][-xst]){3}[.+@]?\s+\d+\s+\S+\s+\S+\s+\d+\s",
            rf"\s*(?:{_MONTH}\s+\d+\s+(?:\d+:\d+|\d{{4}})"
            r"|\d{4}-\d\d-\d\d \d\d:\d\d(?::\S+(?: [+-]\d{4})?)?)",
            r"(?=\s)",
        ),
        # date
        (r"^", rf"{_DAY} {_MONTH}\s+\d+ {_CLOCK}(?: [AP]M)? \S+ \d{{4}}", _END),
        # lines of logs
        (r"^[\[(]?", rf"(?:\d{{4}}-\d\d-\d\d[T ])?{_CLOCK}(?:Z|\s?[+-]\d\d:?\d\d)?", r"(?=[\])]?:?\s+\S)"),
        (r"^", rf"{_MONTH}\s+\d+ {_CLOCK}", r"(?=\s+\w)"),
        (r"\[", rf"\d\d/{_MONTH}/\d{{4}}[: ]{_CLOCK}(?: [+-]\d{{4}})?", r"(?=\])"),
        # HTTP
        (r"^(?:< )?(?:date|last-modified): ", rf"{_DAY}, \d\d {_MONTH} \d{{4}} {_CLOCK} GMT", _END),
        # what harnesses say of today
        (
            r"\b(?:today's date|current[ _]date(?: and time)?)(?: is)?\W{1,3}",
            rf"(?:{_DAY}\w*,?\s)?(?:\d{{4}}-\d\d-\d\d|{_MONTH}\w* \d+,? \d{{4}}|\d+[ /]\w+[ /]\d{{4}})",
            "",
        ),
        # Codex's output, which no tool takes
        (r"^chunk id: ", r"[0-9a-f]{6}", _END),
    )
)
"""Clock times and measured durations, each where a tool or harness is known to write one. Nothing that names
something: the policy may use a name, an id, a hash or a date that it is shown."""
_LONGEST_VARYING = 4_096
_MOST_VARYING = 65_536
"""Characters of a line, and of all lines, that are looked at for what varies."""


def key_of(message: Message) -> Key:
    """A message's identity.

    Not part of it: ids of tool calls (made up), reasoning (many harnesses drop it), spacing around an
    assistant's text (some trim it). What others wrote counts to the last byte: it was rendered.
    """
    if message.role is not Role.ASSISTANT:
        return message.role, message.content, ()
    calls = tuple((call.name, _arguments(call)) for call in message.tool_calls)
    return message.role, message.content.strip(_BLANK), calls


def variations(one: Message, other: Message) -> list[tuple[str, str]] | None:
    """The lines in which two messages differ, if these are the same but for clock times and durations; None
    if they are not. What the assistant said must be the same."""
    if key_of(one) == key_of(other):
        return []
    if one.role is not other.role or one.role is Role.ASSISTANT:
        return None
    lines, others = _lines(one), _lines(other)
    if len(lines) != len(others):
        return None
    differing = [pair for pair in zip(lines, others, strict=True) if pair[0] != pair[1]]
    lengths = [len(line) for pair in differing for line in pair]
    if max(lengths, default=0) > _LONGEST_VARYING or sum(lengths) > _MOST_VARYING:
        return None
    return differing if all(_masked(was) == _masked(now) for was, now in differing) else None


def _lines(message: Message) -> list[str]:
    """Its lines, also where they stand in JSON, with what ends each if that is no line break."""
    return message.content.replace("\\n", "\\n\n").replace('"', '"\n').split("\n")


def _masked(line: str) -> str:
    for pattern in _VARYING:
        line = pattern.sub(r"\1…", line)
    return line


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
