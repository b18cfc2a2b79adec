"""Reads turns of the families of the `renderers` package as they stream; it parses only whole ones.

Text flows while it is plain: thoughts up to the token that ends them, then content up to the first token
that is no text (the mark of a call, for most). What follows is read by the package when the turn is over.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from polar.models.chat import Message, Role, ToolCall
from polar.rendering.base import MessageDelta, ResponseParser
from polar.rendering.byte_level import TextStream, Vocabulary

log = logging.getLogger(__name__)

THINK = "<think>"


@dataclass(frozen=True, slots=True)
class Marks:
    """The tokens by which a family's turn is told apart while it streams."""

    stops: frozenset[int]
    no_text: frozenset[int]
    """Every token that is not plain text: special ones and those added to the vocabulary."""
    think: int | None
    end_of_thought: int | None
    thinks_already: bool
    """Whether the prompt has begun the thoughts."""
    bare_calls: bool
    """Whether a call is nothing but JSON, so that an answer that begins with a brace may be one."""


class _State(Enum):
    BEGIN = auto()
    """Nothing but white space so far."""
    THOUGHT = auto()
    CONTENT = auto()
    HELD = auto()
    """Until the turn is over."""
    OVER = auto()


class WholeParser(ResponseParser):
    """Everything becomes certain at the end."""

    def __init__(self, renderer: Any, prompt_ids: list[int]) -> None:
        self._renderer = renderer
        self._prompt_ids = prompt_ids
        self._ids: list[int] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: tuple[ToolCall, ...] = ()

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        self._ids.extend(ids)
        return MessageDelta()

    def finish(self) -> MessageDelta:
        whole = self._whole()
        content = _rest("content", "".join(self._content), whole.content)
        reasoning = _rest("reasoning", "".join(self._reasoning), whole.reasoning or "")
        self._calls = whole.tool_calls
        return self._said(MessageDelta(content, reasoning, whole.tool_calls))

    @property
    def message(self) -> Message:
        reasoning = "".join(self._reasoning) or None
        return Message(Role.ASSISTANT, "".join(self._content), reasoning, self._calls)

    def _said(self, delta: MessageDelta) -> MessageDelta:
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        return delta

    def _whole(self) -> Message:
        parsed = self._renderer.parse_response(self._ids, prompt_ids=self._prompt_ids)
        calls: list[ToolCall] = []
        content: str = (parsed.content or "").strip()
        for call in parsed.tool_calls:
            if call.status == "ok" and call.name:
                calls.append(ToolCall(f"call_{len(calls)}", call.name, argument_text(call.arguments)))
            else:
                content += call.raw
        reasoning = (parsed.reasoning_content or "").strip() or None
        return Message(Role.ASSISTANT, content, reasoning, tuple(calls))


class AdaptedParser(WholeParser):
    """What was let through is always the beginning of what the package reads at the end."""

    def __init__(self, renderer: Any, prompt_ids: list[int], marks: Marks, vocabulary: Vocabulary) -> None:
        super().__init__(renderer, prompt_ids)
        self._marks = marks
        self._state = _State.THOUGHT if marks.thinks_already else _State.BEGIN
        self._thought = _Flow(vocabulary)
        self._answer = _Flow(vocabulary)
        self._opening = ""
        """What the answer begins with, as long as it may be a mark spelt in letters."""
        self._has_thought = marks.thinks_already
        self._thought_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        return self._thought_tokens

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        super().feed(ids)
        content: list[str] = []
        reasoning: list[str] = []
        for id in ids:
            before = self._state
            match before:
                case _State.HELD | _State.OVER:
                    break
                case _ if id in self._marks.no_text:
                    self._state = self._after(id)
                case _State.THOUGHT:
                    reasoning.append(self._thought.feed(id))
                case _State.BEGIN:
                    content.append(self._begin(self._answer.feed(id)))
                case _State.CONTENT:
                    content.append(self._answer.feed(id))
            self._thought_tokens += _State.THOUGHT in (before, self._state)
        return self._said(MessageDelta("".join(content), "".join(reasoning)))

    def _after(self, mark: int) -> _State:
        if mark in self._marks.stops:
            return _State.OVER
        if mark == self._marks.think and self._state is _State.BEGIN and not self._has_thought:
            self._has_thought = True
            return _State.THOUGHT
        if mark == self._marks.end_of_thought and self._state is _State.THOUGHT:
            return _State.BEGIN
        return _State.HELD

    def _begin(self, text: str) -> str:
        self._opening += text
        spells_think = self._marks.think is None and not self._has_thought
        if not self._opening or (spells_think and THINK.startswith(self._opening)):
            return ""
        is_marked = (self._marks.bare_calls and self._opening.startswith("{")) or (
            spells_think and self._opening.startswith(THINK)
        )
        self._state = _State.HELD if is_marked else _State.CONTENT
        return "" if is_marked else self._opening


class _Flow:
    """Text without the white space that begins or may end it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._text = TextStream(vocabulary)
        self._gap = ""
        self._begun = False

    def feed(self, id: int) -> str:
        text = self._gap + self._text.feed((id,))
        shown = text.rstrip() if self._begun else text.strip()
        self._gap = text[len(text.rstrip()) :]
        self._begun = self._begun or bool(shown)
        return shown


def _rest(what: str, shown: str, whole: str) -> str:
    if whole.startswith(shown):
        return whole[len(shown) :]
    log.warning("the %s of a turn was streamed as it is not parsed; its end is left out", what)
    return ""


def argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
