"""Chat messages → token ids and back, extending a conversation without re-rendering what was sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from polar.models.chat import Message, ToolCall, ToolDefinition


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What became certain of the assistant's message since the last delta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete calls only: a call is emitted when its parse is certain."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


class ResponseParser(ABC):
    """Reads one response's sampled ids as they arrive; the same ids give the same message however split."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> MessageDelta:
        """Take the next sampled ids and return what they made certain."""

    @abstractmethod
    def finish(self) -> MessageDelta:
        """No more ids will come: return whatever was still held back."""

    @property
    @abstractmethod
    def message(self) -> Message:
        """Everything emitted so far as one assistant message."""


class Renderer(ABC):
    """One model family's chat template in tokens."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        """The whole prompt, up to and including the generation prompt."""

    @abstractmethod
    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int] | None:
        """The ids to append to prompt + sampled so that `new_messages` follow and the model may answer.

        They include whatever closes the sampled turn where it was cut short. None if this
        template cannot extend these tokens exactly: the caller then renders anew.
        """

    @abstractmethod
    def parser(self) -> ResponseParser:
        """A fresh parser for one response."""
