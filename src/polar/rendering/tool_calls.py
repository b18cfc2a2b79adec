"""The `<tool_call>` format: writing calls, and parsing them from streamed text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from polar.models.chat import Message, ToolCall, ToolChoice, ToolUse
from polar.rendering.base import MessageDelta, ResponseParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_STRICT = json.JSONDecoder()
_LENIENT = json.JSONDecoder(strict=False)
"""Accepts raw line breaks in strings, which small models write."""
_WHITESPACE = " \t\r\n"
_STRAY = _WHITESPACE + "}]"
"""Text tolerated before a closing tag: small models miscount brackets."""


def assistant_text(message: Message) -> str:
    """An assistant's message exactly as the model is asked to write it."""
    calls = [write_call(call.name, call.arguments) for call in message.tool_calls]
    return "\n".join([message.content, *calls] if message.content else calls)


def write_call(name: str, arguments: str) -> str:
    """Format a call as the model should write it; `arguments` is JSON in any spacing."""
    body = json.dumps({"name": name, "arguments": argument_value(arguments)}, ensure_ascii=False)
    return f"{OPEN}\n{body.encode('utf-8', 'replace').decode()}\n{CLOSE}"


def argument_value(arguments: str) -> Any:
    """Parse arguments; return the text itself if it is not JSON."""
    if not arguments.strip():
        return {}
    try:
        value = _LENIENT.decode(arguments)
        if "\\ud" in arguments.lower():
            # A lone surrogate is legal in JSON's escapes but is no text.
            value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return arguments
    return value


class _CallState(Enum):
    TEXT = auto()
    CALL = auto()
    AFTER_CALL = auto()


class CallReader:
    """Splits text into content and calls; what it returns depends on the text, not on its pieces.

    Text flows as soon as it cannot be the start of a call. A call is emitted when its JSON is
    complete, with or without the closing tag. What does not parse stays content, tags included.
    """

    def __init__(self) -> None:
        self._state = _CallState.TEXT
        self._buffer = ""
        self._has_text = False
        self._text_since_call = True
        self._gap = ""
        self._scan = _BracketScan()

    def feed(self, text: str) -> MessageDelta:
        self._buffer += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._step(content, calls):
            pass
        return MessageDelta(content="".join(content), tool_calls=tuple(calls))

    def finish(self) -> MessageDelta:
        content: list[str] = []
        match self._state:
            case _CallState.TEXT:
                if self._text_since_call or self._buffer.strip():
                    self._emit(self._buffer, content)
            case _CallState.CALL:
                self._emit(self._gap + OPEN + self._buffer, content)
            case _CallState.AFTER_CALL:
                pass
        self._buffer = ""
        return MessageDelta(content="".join(content))

    def _step(self, content: list[str], calls: list[ToolCall]) -> bool:
        """Consume what is certain; return False if more text is needed."""
        match self._state:
            case _CallState.TEXT:
                return self._read_text(content)
            case _CallState.CALL:
                return self._read_call(content, calls)
            case _CallState.AFTER_CALL:
                return self._read_close()

    def _read_text(self, content: list[str]) -> bool:
        start = self._buffer.find(OPEN)
        end = start if start >= 0 else len(self._buffer) - overlap(self._buffer, OPEN)
        text = self._buffer[:end].rstrip()
        self._emit(text, content)
        if start < 0:
            self._buffer = self._buffer[len(text) :]
            return False
        self._gap = self._buffer[len(text) : start]
        self._buffer = self._buffer[start + len(OPEN) :]
        self._scan = _BracketScan()
        self._state = _CallState.CALL
        return True

    def _read_call(self, content: list[str], calls: list[ToolCall]) -> bool:
        outcome = self._scan.advance(self._buffer)
        if outcome is None:
            return False
        body, self._buffer = self._buffer[: self._scan.position], self._buffer[self._scan.position :]
        parsed = calls_in(body) if outcome else []
        if not parsed:
            self._emit(self._gap + OPEN + body, content)
            self._state = _CallState.TEXT
            return True
        calls += [replace(call, id="") for call in parsed]
        self._text_since_call = False
        self._state = _CallState.AFTER_CALL
        return True

    def _read_close(self) -> bool:
        rest = self._buffer.lstrip(_STRAY)
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        if rest.startswith(CLOSE):
            self._buffer = rest[len(CLOSE) :]
        self._state = _CallState.TEXT
        return True

    def _emit(self, text: str, content: list[str]) -> None:
        if text and not self._text_since_call and not self._has_text:
            text = text.lstrip()
        if not text:
            return
        self._has_text = self._text_since_call = True
        content.append(text)


class _BracketScan:
    """Finds the end of a JSON object or list, reading each character once."""

    def __init__(self) -> None:
        self.position = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def advance(self, text: str) -> bool | None:
        """True if a value ends at `position`, False if none can, None if more text is needed."""
        while self.position < len(text):
            character = text[self.position]
            if self._depth == 0 and character not in _WHITESPACE and character not in "{[":
                return False
            self.position += 1
            if self._closes(text, character):
                return False
            if self._in_string:
                self._inside_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return True
        return None

    def _inside_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False

    def _closes(self, text: str, character: str) -> bool:
        """Whether the closing tag came before the brackets closed. Inside an unclosed string it counts only
        on its own line."""
        if character != ">":
            return False
        tag = "\n" + CLOSE if self._in_string else CLOSE
        return text.endswith(tag, 0, self.position)


def calls_in(body: str) -> list[ToolCall]:
    """Parse the calls in a JSON object or list; none if it is not one."""
    text = body.strip()
    try:
        if text.startswith("["):
            value, _ = _LENIENT.raw_decode(text)
            found = [call_of(json.dumps(item)) for item in value]
        else:
            found = [call_of(text)]
    except (ValueError, RecursionError):
        return []
    return found


def call_of(text: str) -> ToolCall:
    """Parse a call with its own id; raise ValueError if it names no function or its arguments are no
    object."""
    members = {key: (value, raw) for key, value, raw in _members(text)}
    name, _ = members.get("name") or members.get("tool_name") or (None, "")
    if not isinstance(name, str) or not name:
        raise ValueError("a call needs a name")
    name.encode()  # half a surrogate pair, which JSON can escape, is no text that anyone could answer to
    value, raw = members.get("arguments") or members.get("parameters") or ({}, "{}")
    if isinstance(value, str):
        raw = value
        value = _LENIENT.decode(value)
    if not isinstance(value, dict):
        raise ValueError("arguments must be an object")
    raw = strict_json(raw, value)
    id, _ = members.get("id") or members.get("tool_call_id") or ("", "")
    return ToolCall(str(id), name, raw)


def strict_json(text: str, value: Any) -> str:
    """The text itself if it is strict JSON, else its value re-encoded."""
    try:
        _STRICT.decode(text)
    except ValueError:
        return json.dumps(value)
    return text


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """The key, value and source text of each member of a JSON object."""
    if not text.startswith("{"):
        raise ValueError("a call is an object")
    position = _skip(text, 1)
    while text[position : position + 1] != "}":
        key, position = _LENIENT.raw_decode(text, position)
        position = _skip(text, position)
        if not isinstance(key, str) or text[position : position + 1] != ":":
            raise ValueError("not an object")
        start = _skip(text, position + 1)
        value, end = _LENIENT.raw_decode(text, start)
        yield key, value, text[start:end]
        position = _skip(text, end)
        if text[position : position + 1] == ",":
            position = _skip(text, position + 1)
        elif text[position : position + 1] != "}":
            raise ValueError("not an object")


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _WHITESPACE:
        position += 1
    return position


def overlap(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    start = text.find(tag[:1], max(len(text) - len(tag) + 1, 0)) if tag else -1
    while start >= 0 and not tag.startswith(text[start:]):
        start = text.find(tag[:1], start + 1)
    return len(text) - start if start >= 0 else 0


FIRST_CALL_ENDS = f"\n{CLOSE}"
"""Ends a turn of at most one call; inside JSON a line break is never raw, so no argument contains it."""


def limited(parser: ResponseParser, choice: ToolChoice) -> ResponseParser:
    """Limit a parser to the allowed calls: none, which makes them text, or only the first."""
    if choice.use is not ToolUse.NONE and choice.parallel:
        return parser
    return _LimitedParser(parser, choice)


class _LimitedParser(ResponseParser):
    def __init__(self, parser: ResponseParser, choice: ToolChoice) -> None:
        self._parser = parser
        self._choice = choice
        self._has_called = False

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        return self._within(self._parser.feed(ids))

    def finish(self) -> MessageDelta:
        return self._within(self._parser.finish())

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def _within(self, delta: MessageDelta) -> MessageDelta:
        if not delta.tool_calls:
            return delta
        if self._choice.use is ToolUse.NONE:
            said = "\n".join(write_call(call.name, call.arguments) for call in delta.tool_calls)
            return replace(delta, content=delta.content + said, tool_calls=())
        first = () if self._has_called else delta.tool_calls[:1]
        self._has_called = True
        return replace(delta, tool_calls=first)
