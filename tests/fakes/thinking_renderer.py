"""The renderer of a model that thinks: the first line of every answer is its reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polar.models.chat import Message, ToolDefinition
from polar.rendering.base import IdSequence, MessageDelta, Renderer, ResponseParser
from polar.rendering.families import renderer_for


def thinking_renderer(directory: Path) -> Renderer:
    """The model's own renderer but for how it reads answers."""
    renderer = renderer_for("thinking", directory, tool_prompt=True)
    read = renderer.parser

    def parser(tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None) -> ResponseParser:
        return _FirstLineThinks(read(tools, prompt_ids))

    renderer.parser = parser  # type: ignore[method-assign]
    return renderer


class _FirstLineThinks(ResponseParser):
    def __init__(self, parser: ResponseParser) -> None:
        self._parser = parser
        self._thinks = True

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        return self._split(self._parser.feed(ids))

    def finish(self) -> MessageDelta:
        return self._split(self._parser.finish())

    def _split(self, delta: MessageDelta) -> MessageDelta:
        if not self._thinks:
            return delta
        reasoning, line_end, content = delta.content.partition("\n")
        self._thinks = not (line_end or delta.tool_calls)
        return MessageDelta(content, reasoning, delta.tool_calls)

    @property
    def message(self) -> Message:
        raise NotImplementedError("nobody asks a fake for what it has said")
