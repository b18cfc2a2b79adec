"""Chat messages → token ids and back, extending a conversation without re-rendering what was sampled."""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from polar.errors import InvalidInput
from polar.models.chat import Message, TokenLogprob, ToolCall, ToolDefinition
from polar.models.completion import Ids
from polar.rendering.tokenizer import RawText

IdSequence = Sequence[int] | Ids
"""Token ids; an array on the way of a long conversation."""


class Unrenderable(InvalidInput):
    """Messages that a family's template has no form for."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What became certain of the assistant's message since the last delta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete calls only: a call is emitted when its parse is certain. Its id is for the gateway to give."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The logprobs of the tokens sampled since the last delta, where the client wants them."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls or self.logprobs)

    def __add__(self, later: MessageDelta) -> MessageDelta:
        return MessageDelta(
            self.content + later.content,
            self.reasoning + later.reasoning,
            self.tool_calls + later.tool_calls,
            self.logprobs + later.logprobs,
        )


@dataclass(frozen=True, slots=True)
class Thinking:
    """The block in which a family thinks before it answers."""

    begin: str
    """What the model writes to begin it; empty where the prompt has begun it already."""
    end: str
    """What ends it, with the white space that stands before the answer."""


@dataclass(frozen=True, slots=True)
class TurnForm:
    """How a family writes a turn, as far as it must be known to hold a turn to a format."""

    is_plain: bool = False
    """Whether text follows the prompt, or the thoughts, as it is, without marks of the family's own."""
    writes_calls: bool = False
    """Whether calls are `<tool_call>` blocks that hold JSON."""
    thinking: Thinking | None = None


class ResponseParser(ABC):
    """Reads one response's sampled ids as they arrive; the same ids give the same message however split."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> MessageDelta:
        """Take the next sampled ids and return what they made certain."""

    @abstractmethod
    def finish(self) -> MessageDelta:
        """No more ids will come: return whatever was still held back."""

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids so far the model thought in, marks included; 0 where that cannot be told."""
        return 0


class RawParser(ResponseParser):
    """Takes all that is sampled, up to the token that ends it, for text."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        stops = self._renderer.stop_token_ids
        spelt = b"".join(self._renderer.spelling(id) for id in ids if id not in stops)
        return MessageDelta(self._decoder.decode(spelt))

    def finish(self) -> MessageDelta:
        return MessageDelta(self._decoder.decode(b"", final=True))


class Renderer(ABC):
    """One model family's chat template in tokens."""

    raw: RawText
    """The model's tokens without the template."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The family, and what is said beyond its template: recordings disclose it."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @property
    def call_form(self) -> str | None:
        """In what form the model's calls are read; None where none are."""
        return "hermes" if self.form.writes_calls else "its family's own"

    @property
    def form(self) -> TurnForm:
        """How turns are written; as long as it is not known, no turn can be held to a format."""
        return TurnForm()

    @abstractmethod
    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        """The whole prompt, up to and including the generation prompt."""

    @abstractmethod
    def bridge(
        self,
        prompt_ids: IdSequence,
        sampled_ids: IdSequence,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int] | None:
        """The ids to append to prompt + sampled so that `new_messages` follow and the model may answer.

        They include whatever closes the sampled turn where it was cut short. None if this
        template cannot extend these tokens exactly: the caller then renders anew. `history` is what prompt
        and sampled ids say, the sampled message last, and `tools` are those that the prompt offers.
        """

    def opened(self, text: str) -> list[int] | None:
        """The ids that begin an answer with this text, after the generation prompt; None: there is no way."""
        return None

    @abstractmethod
    def spelling(self, id: int) -> bytes:
        """What one id stands for, control tokens spelt out."""

    @abstractmethod
    def parser(
        self, tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None
    ) -> ResponseParser:
        """A fresh parser for one response to a prompt that offers these tools."""
