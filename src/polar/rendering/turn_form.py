"""Finds out how a model family writes a turn, from how it renders some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import Thinking, TurnForm
from polar.rendering.tool_calls import write_call

THINK = "<think>"
THINK_END = "</think>"


def found_form(text_of: Callable[[Sequence[Message], Sequence[ToolDefinition]], str]) -> TurnForm:
    """The form of a family by how it renders turns: `text_of` gives prompts, control tokens included."""
    asked = Message(Role.USER, "question")
    answered = Message(Role.ASSISTANT, "answer")
    thought = Message(Role.ASSISTANT, "answer", reasoning="reasons")
    tool = ToolDefinition("f", "d", {"type": "object", "properties": {"a": {"type": "string"}}})
    calling = Message(Role.ASSISTANT, tool_calls=(ToolCall("c", "f", '{"a": "b"}'),))

    prompt = text_of([asked], ())
    writes_calls = write_call("f", '{"a": "b"}') in text_of([asked, calling], [tool])
    with_thoughts = text_of([asked, thought], ())
    ending = re.search(rf"reasons\s*({re.escape(THINK_END)}\s*)answer", with_thoughts)
    if ending and prompt.rstrip().endswith(THINK):
        return TurnForm(True, writes_calls, Thinking("", ending[1]))
    if ending and with_thoughts.startswith(prompt + THINK):
        return TurnForm(True, writes_calls, Thinking(THINK, ending[1]))
    return TurnForm(text_of([asked, answered], ()).startswith(prompt + "answer"), writes_calls)
