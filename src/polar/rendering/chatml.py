"""ChatML in tokens: `<|im_start|>role\\ncontent<|im_end|>\\n`; plain as in SmolLM2, or with Qwen2.5's tools.

Calls are `<tool_call>` blocks inside the assistant's turn, results are `<tool_response>` blocks inside a
user turn, as Qwen2.5's template has them. The plain template has no form for either: a role of its own for
results would be a header that the model never saw in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from itertools import groupby

from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import IdSequence, MessageDelta, Renderer, ResponseParser, TurnForm
from polar.rendering.tokenizer import KeptTexts, RawText, TextStream, Vocabulary
from polar.rendering.tool_calls import CallReader, assistant_text
from polar.rendering.tool_prompt import HERMES_FRAME, demonstration, hermes_section, tool_section

START = "<|im_start|>"
END = "<|im_end|>"
SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What SmolLM2's own template says when the conversation begins without a system message."""

_OTHER_ENDS = ("<|endoftext|>",)
"""Tokens that end a document in pre-training; a model that samples one has nothing more to say."""


class ToolForm(Enum):
    """How tools are described to the model."""

    NONE = auto()
    """Not at all, as in a template without tools."""
    PROMPT = auto()
    """A section and demonstration turns of ours, for small models whose template has no tools."""
    HERMES = auto()
    """As JSON in the system message, as in Qwen2.5's template."""


_NAMES = {ToolForm.NONE: "chatml", ToolForm.PROMPT: "chatml+tool_prompt", ToolForm.HERMES: "qwen2.5"}


class ChatML(Renderer):
    """Renders ChatML; text from outside is always plain text, never a control token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        default_system: str | None = SMOLLM_SYSTEM,
        tools: ToolForm,
        tool_frame: tuple[str, str] = HERMES_FRAME,
    ) -> None:
        self._tokenizer = tokenizer
        start, end = self._tokenizer.token_to_id(START), self._tokenizer.token_to_id(END)
        if start is None or end is None:
            raise InvalidInput(f"not a ChatML tokenizer: it has no {START} and {END}")
        self._start, self._end = start, end
        self._tokenizer.encode_special_tokens = True
        self._texts = KeptTexts(tokenizer)
        self.raw = RawText(tokenizer)
        if {start, end} & set(self._encode(START + END)):
            raise InvalidInput(f"{START} and {END} must be special tokens, else messages could forge turns")
        if "ByteLevel" not in repr(self._tokenizer.decoder):
            raise InvalidInput("only byte-level BPE tokenizers are supported for ChatML")
        others = (self._tokenizer.token_to_id(token) for token in _OTHER_ENDS)
        self._stops = (end, *(id for id in others if id is not None))
        self._default_system = default_system
        self._tools = tools
        self._tool_frame = tool_frame
        self._vocabulary = Vocabulary(self._tokenizer)
        self._newline = self._encode("\n")
        self._generation_prompt = [start, *self._encode("assistant\n")]

    @property
    def name(self) -> str:
        return _NAMES[self._tools]

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    @property
    def form(self) -> TurnForm:
        return TurnForm(is_plain=True, writes_calls=True)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        has_system = bool(messages) and messages[0].role is Role.SYSTEM
        system = messages[0].content if has_system else self._default_system
        section = self._tool_section(tools)
        if section:
            # Qwen2.5's template leaves the gap also after an empty system message.
            is_alone = not system and self._tools is ToolForm.PROMPT
            system = section if is_alone else f"{system or ''}\n\n{section}"
        ids: list[int] = []
        if has_system or system:
            ids.extend(self._turn("system", system or ""))
        if self._tools is ToolForm.PROMPT:
            ids.extend(self._turns(demonstration(tools)))
        ids.extend(self._turns(messages[1:] if has_system else messages))
        return ids + self._generation_prompt

    def bridge(
        self,
        prompt_ids: IdSequence,
        sampled_ids: IdSequence,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int] | None:
        ended = len(sampled_ids) > 0 and sampled_ids[-1] == self._end
        close = self._newline if ended else [self._end, *self._newline]
        return [*close, *self._turns(new_messages), *self._generation_prompt]

    def opened(self, text: str) -> list[int] | None:
        return self._encode(text)

    def spelling(self, id: int) -> bytes:
        return self._vocabulary.spelling(id)

    def parser(
        self, tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None
    ) -> ResponseParser:
        return ChatMLParser(self._vocabulary, self._stops)

    def _tool_section(self, tools: Sequence[ToolDefinition]) -> str:
        match self._tools:
            case ToolForm.NONE:
                return ""
            case ToolForm.PROMPT:
                return tool_section(tools)
            case ToolForm.HERMES:
                return hermes_section(tools, self._tool_frame)

    def _turns(self, messages: Sequence[Message]) -> Iterator[int]:
        for is_tool, group in groupby(messages, key=lambda message: message.role is Role.TOOL):
            if is_tool:
                yield from self._turn("user", "\n".join(map(_tool_response, group)))
                continue
            for message in group:
                if message.role is Role.ASSISTANT:
                    yield from self._assistant_turn(message)
                else:
                    yield from self._turn(message.role.value, message.content)

    def _turn(self, role: str, content: str) -> list[int]:
        return [self._start, *self._encode(f"{role}\n{content}"), self._end, *self._newline]

    def _assistant_turn(self, message: Message) -> list[int]:
        # Tokenised apart from its header, as it is when the model writes it: a merge across the
        # boundary would give a context the policy never produces itself.
        return [*self._generation_prompt, *self._encode(assistant_text(message)), self._end, *self._newline]

    def _encode(self, text: str) -> list[int]:
        return self._texts.ids(text)


def _tool_response(message: Message) -> str:
    return f"<tool_response>\n{message.content}\n</tool_response>"


class ChatMLParser(ResponseParser):
    """Reads a sampled turn up to its end token."""

    def __init__(self, vocabulary: Vocabulary, stops: tuple[int, ...]) -> None:
        self._text = TextStream(vocabulary)
        self._calls_reader = CallReader()
        self._stops = frozenset(stops)
        self._ended = False
        self._content: list[str] = []
        self._calls: list[ToolCall] = []

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        if self._ended:
            return MessageDelta()
        end = next((position for position, id in enumerate(ids) if id in self._stops), None)
        self._ended = end is not None
        return self._keep(self._calls_reader.feed(self._text.feed(ids[:end])))

    def finish(self) -> MessageDelta:
        tail = self._calls_reader.feed(self._text.finish())
        rest = self._calls_reader.finish()
        return self._keep(
            MessageDelta(content=tail.content + rest.content, tool_calls=tail.tool_calls + rest.tool_calls)
        )

    def _keep(self, delta: MessageDelta) -> MessageDelta:
        self._content.append(delta.content)
        self._calls.extend(delta.tool_calls)
        return delta

    @property
    def message(self) -> Message:
        return Message(Role.ASSISTANT, "".join(self._content), tool_calls=tuple(self._calls))
