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
"""Token ids; an array for long conversations."""


class Unrenderable(InvalidInput):
    """Messages that the template cannot render."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """Parts of the assistant's message that became certain since the last delta."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Complete calls only, without ids, which the gateway assigns."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Logprobs of the tokens since the last delta, if requested."""

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
    """The marks around a family's thoughts."""

    begin: str
    """Opening mark; empty if the prompt contains it."""
    end: str
    """Closing mark, with the white space before the answer."""


@dataclass(frozen=True, slots=True)
class TurnForm:
    """A family's form of turns, as far as constraints need it."""

    is_plain: bool = False
    """Whether text follows the prompt or the thoughts directly, without other marks."""
    writes_calls: bool = False
    """Whether calls are `<tool_call>` blocks of JSON."""
    thinking: Thinking | None = None


class ResponseParser(ABC):
    """Reads one response's sampled ids as they arrive; the same ids give the same message however split."""

    @abstractmethod
    def feed(self, ids: Sequence[int]) -> MessageDelta:
        """Feed the next sampled ids; return what they made certain."""

    @abstractmethod
    def finish(self) -> MessageDelta:
        """End the answer; return whatever was held back."""

    @property
    def reasoning_tokens(self) -> int:
        """Number of ids spent on thoughts so far, marks included; 0 if unknown."""
        return 0


class RawParser(ResponseParser):
    """Treats everything up to the end token as text."""

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
        """The family and any addition to its template, for recordings."""

    @property
    @abstractmethod
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn."""

    @property
    def call_form(self) -> str | None:
        """The form in which calls are parsed; None if they are not."""
        return "hermes" if self.form.writes_calls else "its family's own"

    @property
    def form(self) -> TurnForm:
        """The form of turns; None if unknown, so that no turn can be constrained."""
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
        """The ids of a prefilled answer, after the generation prompt; None if impossible."""
        return None

    @abstractmethod
    def spelling(self, id: int) -> bytes:
        """The bytes of one id, with control tokens spelled out."""

    @abstractmethod
    def parser(
        self, tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None
    ) -> ResponseParser:
        """A fresh parser for one response to a prompt that offers these tools."""
