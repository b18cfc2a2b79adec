"""ChatML of a model that thinks: the first line of every answer is its reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polar.models.chat import Message, ToolDefinition
from polar.rendering.base import IdSequence, MessageDelta, ResponseParser
from polar.rendering.chatml import ChatML, ToolForm
from polar.rendering.tokenizer import read_tokenizer


class ThinkingChatML(ChatML):
    def __init__(self, tokenizer_file: Path) -> None:
        super().__init__(read_tokenizer(tokenizer_file), tools=ToolForm.PROMPT)

    def parser(
        self, tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None
    ) -> ResponseParser:
        return _FirstLineThinks(super().parser(tools, prompt_ids))


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
