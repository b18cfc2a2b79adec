"""Parses a sampled turn by its template's marks: thoughts, then content and calls.

A turn of Harmony (gpt-oss) is several messages instead, each in a channel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from polar.models.chat import ToolDefinition
from polar.rendering.base import MessageDelta, ResponseParser
from polar.rendering.call_forms import CallForm, HeldCalls
from polar.rendering.tokenizer import TextStream, Vocabulary
from polar.rendering.tool_calls import CallReader, overlap


@dataclass(frozen=True, slots=True)
class TurnMarks:
    """The marks between the parts of a turn."""

    vocabulary: Vocabulary
    """Spells out the control tokens that are marks."""
    stops: frozenset[int]
    think: str
    """Begins thoughts, which `end_of_thought` ends; empty for families without thoughts."""
    end_of_thought: str
    calls: CallForm | None
    keeps_space: bool = False
    """Whether white space around an answer belongs to it."""


class _Part(Enum):
    BEGIN = auto()
    """Nothing yet, or the possible beginning of thoughts."""
    THOUGHT = auto()
    ANSWER = auto()
    CALL = auto()
    """Used by Harmony, where calls are separate messages."""


class TurnParser(ResponseParser):
    def __init__(self, marks: TurnMarks, tools: Sequence[ToolDefinition], *, has_begun: bool) -> None:
        """`has_begun`: whether the prompt contains the opening of thoughts."""
        self._stops = marks.stops
        self._text = TextStream(marks.vocabulary)
        self._think, self._end_of_thought = marks.think, marks.end_of_thought
        self._reader: CallReader | HeldCalls | None = marks.calls.reader(tools) if marks.calls else None
        self._part = _Part.BEGIN if marks.think else _Part.ANSWER
        if has_begun:
            self._part = _Part.THOUGHT
        self._buffer = ""
        """Text not classified yet."""
        self._thought, self._answer = _Said(), _Said(keeps_space=marks.keeps_space)
        self._thought_tokens = 0
        self._has_ended = False

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        delta = MessageDelta()
        if self._has_ended:
            return delta
        end = next((place for place, id in enumerate(ids) if id in self._stops), len(ids))
        self._has_ended = end < len(ids)
        for place in range(end):
            before = self._part
            if before is _Part.ANSWER:  # only thoughts are counted token by token
                return delta + self._emit_answer(self._text.feed(ids[place:end]))
            delta += self._read(self._text.feed((ids[place],)))
            self._thought_tokens += _Part.THOUGHT in (before, self._part)
        return delta

    def finish(self) -> MessageDelta:
        rest = self._read(self._text.finish())
        held, self._buffer = self._buffer, ""
        if self._part is _Part.THOUGHT:
            return MessageDelta(rest.content, rest.reasoning + self._thought.feed(held))
        last = self._emit_answer(held)
        return rest + last + self._emit(self._reader.finish() if self._reader else MessageDelta())

    @property
    def reasoning_tokens(self) -> int:
        return self._thought_tokens

    def _read(self, text: str) -> MessageDelta:
        if self._part is _Part.ANSWER:
            return self._emit_answer(text)
        self._buffer += text
        if self._part is _Part.BEGIN:
            begun = self._buffer.lstrip()
            if not begun.startswith(self._think):
                if self._think.startswith(begun):
                    return MessageDelta()
                self._part = _Part.ANSWER
                text, self._buffer = self._buffer, ""
                return self._emit_answer(text)
            self._part = _Part.THOUGHT
            self._buffer = begun.removeprefix(self._think)
        end = self._end_of_thought
        thought, ended, answer = self._buffer.partition(end)
        if not ended:
            known = len(self._buffer) - overlap(self._buffer, end)
            thought, self._buffer = self._buffer[:known], self._buffer[known:]
            return MessageDelta(reasoning=self._thought.feed(thought))
        self._part, self._buffer = _Part.ANSWER, ""
        said = self._emit_answer(answer)
        return MessageDelta(said.content, self._thought.feed(thought), said.tool_calls)

    def _emit_answer(self, text: str) -> MessageDelta:
        return self._emit(self._reader.feed(text) if self._reader else MessageDelta(text))

    def _emit(self, delta: MessageDelta) -> MessageDelta:
        return MessageDelta(self._answer.feed(delta.content), tool_calls=delta.tool_calls)


_START, _CHANNEL, _MESSAGE, _END = b"<|start|>", b"<|channel|>", b"<|message|>", b"<|end|>"
_THINKS, _CALLS = re.compile(r"<\|channel\|>\s*analysis"), re.compile(r"\bto=")


class ChannelParser(ResponseParser):
    """Parses the messages of a Harmony turn: a header, `<|message|>`, a text, and `<|end|>` between them.

    The channel `analysis` contains thoughts, messages with a recipient are calls, and the rest is the answer.
    """

    def __init__(self, marks: TurnMarks, tools: Sequence[ToolDefinition]) -> None:
        self._marks = marks
        self._tools = tools
        self._part = _Part.BEGIN
        self._text = TextStream(marks.vocabulary)
        self._held = ""
        """The header of the current message, and all of a call."""
        self._said: set[_Part] = set()
        self._gap = ""
        """Separates two messages that clients see as one text."""
        self._tokens = self._thought_tokens = 0
        """Tokens of the current message, and of thoughts."""
        self._has_ended = False

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        delta = MessageDelta()
        for id in ids:
            if self._has_ended:
                break
            self._tokens += 1
            self._has_ended = id in self._marks.stops
            delta += self._read(id)
        return delta

    def finish(self) -> MessageDelta:
        return self._close()

    @property
    def reasoning_tokens(self) -> int:
        return self._thought_tokens + (self._tokens if self._part is _Part.THOUGHT else 0)

    def _read(self, id: int) -> MessageDelta:
        spelt = self._marks.vocabulary.spelling(id)
        is_header = self._part is _Part.BEGIN
        if self._has_ended or spelt in (_START, _END) or (spelt == _CHANNEL and not is_header):
            delta = self._close()
            self._held = spelt.decode() if spelt in (_START, _CHANNEL) else ""
            return delta
        delta = self._taken(self._text.feed((id,)))
        if is_header and spelt == _MESSAGE:
            thinks, calls = _THINKS.search(self._held), _CALLS.search(self._held)
            self._part = _Part.CALL if calls else _Part.THOUGHT if thinks else _Part.ANSWER
        return delta

    def _close(self) -> MessageDelta:
        """End the current message; return its held text."""
        delta = self._taken(self._text.finish())
        if self._part is _Part.CALL:
            calls = self._marks.calls.calls(self._held, self._tools) if self._marks.calls else ()
            delta = MessageDelta(tool_calls=calls) if calls else self._spoken(_Part.ANSWER, self._held)
        elif self._part is _Part.BEGIN and not self._held.startswith("<|"):
            delta = self._spoken(_Part.ANSWER, self._held)  # text without a header
        self._thought_tokens, self._tokens = self.reasoning_tokens, 0
        self._part, self._held = _Part.BEGIN, ""
        self._gap = "\n\n"
        return delta

    def _taken(self, text: str) -> MessageDelta:
        if self._part in (_Part.BEGIN, _Part.CALL):
            self._held += text
            return MessageDelta()
        return self._spoken(self._part, text)

    def _spoken(self, part: _Part, text: str) -> MessageDelta:
        if text:
            text = self._gap + text if part in self._said else text
            self._said.add(part)
            self._gap = ""
        return MessageDelta(reasoning=text) if part is _Part.THOUGHT else MessageDelta(text)


class _Said:
    """Strips the white space around answers where templates have their own."""

    def __init__(self, *, keeps_space: bool = False) -> None:
        self._keeps_space = keeps_space
        self._has_begun = False
        self._gap = ""

    def feed(self, text: str) -> str:
        shown = text
        if not self._keeps_space:
            text = self._gap + text
            shown = text.rstrip() if self._has_begun else text.strip()
            self._gap = text[len(text.rstrip()) :]
        self._has_begun = self._has_begun or bool(shown)
        return shown
