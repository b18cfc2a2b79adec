"""Model families of the PyPI package `renderers` on our interface; the package is an optional extra.

It parses only whole turns. Here text flows while it is plain: thoughts up to the token that ends them, then
content up to the first token that is no text (the mark of a call, for most). What follows is read by the
package when the turn is over.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polar.errors import InvalidInput
from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import (
    IdSequence,
    MessageDelta,
    Renderer,
    ResponseParser,
    Thinking,
    TurnForm,
    Unrenderable,
)
from polar.rendering.template import message_fields, tool_fields
from polar.rendering.tokenizer import KeptTexts, TextStream, Vocabulary
from polar.rendering.tool_calls import write_call

log = logging.getLogger(__name__)


PACKAGE_FAMILIES = (
    "qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl", "prime-qwen3", "llama-3", "deepseek-v3",
    "deepseek-r1", "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "gpt-oss", "hy3",
    "inkling", "kimi-k2", "kimi-k2.5", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1",
    "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5",
)  # fmt: skip
"""As the package calls them; of two that render alike the first is taken."""
_HARMONY = "<|channel|>"
"""Without it gpt-oss is not tried: it fetches its vocabulary from the network first."""


def possible_families(tokens: set[str]) -> Iterator[str]:
    """The package's families that a tokenizer with these added tokens may belong to."""
    return (family for family in PACKAGE_FAMILIES if family != "gpt-oss" or _HARMONY in tokens)


def adapted_renderer(family: str, tokenizer: Tokenizer, *, keeps_thoughts: bool) -> Renderer | None:
    """A family of the package for a tokenizer; None if the package is absent or the tokenizer another's."""
    try:
        package: Any = import_module("renderers")
        config = _config(family)
    except ImportError:
        return None
    if config is None:
        return None
    # Some families look their control tokens up as text, so these count in text until all are known.
    tokens = _Tokens(family, tokenizer)
    try:
        renderer = package.create_renderer(tokens, config(name=family))
    except Exception as error:  # each family says in its own way that its control tokens are missing
        log.debug("renderer %s: %s", family, error)
        return None
    if keeps_thoughts:
        try:
            renderer = package.create_renderer(tokens, config(name=family, thinking_retention="all"))
        except ValueError as error:
            raise InvalidInput(f"engine.history: {family} cannot keep earlier thoughts: {error}") from None
    usual = renderer.render_ids(_PROBE, tools=_PROBE_TOOLS, add_generation_prompt=True)
    tokens.control_in_text = False
    if renderer.render_ids(_PROBE, tools=_PROBE_TOOLS, add_generation_prompt=True) != usual:
        # Some also write them as text; then outside text could spell them too.
        log.warning("%s: its renderer cannot keep control tokens out of messages", family)
        tokens.control_in_text = True
    return AdaptedRenderer(renderer, tokens)


def _config(family: str) -> Any:
    """The package's type of a family's settings; None where this release has no such family."""
    configs = vars(import_module("renderers.configs")).values()
    named = (
        each for each in configs if isinstance(each, type) and "name" in getattr(each, "model_fields", ())
    )
    return next((each for each in named if _default_name(each) == family), None)


def _default_name(config: Any) -> Any:
    return config.model_fields["name"].default


_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_PROBE: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [_CALL]},
    {"role": "tool", "content": "t", "tool_call_id": "c", "name": "f"},
]
_PROBE_TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
]
_NO_FORM = (ValueError, TypeError, LookupError, AssertionError)
"""How the package says that a template has no form for messages."""
_BARE_CALL = '{"name": "f", "parameters": {}}'
_WINDOW = 64
"""Ids before a sampled turn that a family surely looks at, at most back to the end of another turn."""


class AdaptedRenderer(Renderer):
    def __init__(self, renderer: Any, tokens: _Tokens) -> None:
        self._renderer = renderer
        self._tokens = tokens
        self._stops = tuple(renderer.get_stop_token_ids())
        self._prompt: list[int] = renderer.render_ids(_PROBE[:2], add_generation_prompt=True)
        """Ends as every prompt does; thoughts may have begun there."""

    @property
    def name(self) -> str:
        return self._tokens.name_or_path

    @cached_property
    def form(self) -> TurnForm:
        return found_form(lambda messages, tools: self._tokens.decode(self.render(messages, tools)))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._stops

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        try:
            ids: list[int] = self._renderer.render_ids(
                [message_fields(message) for message in messages],
                tools=[tool_fields(tool) for tool in tools] or None,
                add_generation_prompt=True,
            )
        except _NO_FORM as error:
            raise Unrenderable(f"this model's template cannot show the conversation: {error}") from None
        return ids

    def bridge(
        self,
        prompt_ids: IdSequence,
        sampled_ids: IdSequence,
        new_messages: Sequence[Message],
        *,
        history: Sequence[Message] = (),
        tools: Sequence[ToolDefinition] = (),
    ) -> list[int] | None:
        prompt, sampled = self._last_turn(prompt_ids), _listed(sampled_ids)
        fields = [message_fields(message) for message in new_messages]
        try:
            rendered = self._renderer.bridge_to_next_turn(prompt, sampled, fields)
        except _NO_FORM:
            return None
        before = prompt + sampled
        if rendered is None or rendered.token_ids[: len(before)] != before:
            return None
        ids: list[int] = rendered.token_ids[len(before) :]
        return ids

    def opened(self, text: str) -> list[int] | None:
        thinking = self.form.thinking
        # Where the prompt has begun the thoughts, text after it would be one of them.
        follows_prompt = self.form.is_plain and (thinking is None or bool(thinking.begin))
        return self._tokens.encode(text) if follows_prompt else None

    def spelling(self, id: int) -> bytes:
        tokens = self._tokens
        return tokens.vocabulary.spelling(id) if tokens.is_byte_level else tokens.decode(id).encode()

    def parser(
        self, tools: Sequence[ToolDefinition] = (), prompt_ids: IdSequence | None = None
    ) -> ResponseParser:
        read = self._read_with(tools)
        if self._marks is None:
            return WholeParser(read)
        return AdaptedParser(read, self._marks, self._tokens.vocabulary)

    def _read_with(self, tools: Sequence[ToolDefinition]) -> Callable[[list[int]], Any]:
        """How the package reads a whole turn."""
        return partial(
            self._renderer.parse_response,
            tools=[tool_fields(tool) for tool in tools] or None,
            prompt_ids=self._prompt,
        )

    @cached_property
    def _marks(self) -> Marks | None:
        """How turns are read while they stream; None where only the whole can be read."""
        try:
            marks = self._found_marks()
            return marks if marks is not None and self._reads_alike(marks) else None
        except _NO_FORM:
            return None

    def _reads_alike(self, marks: Marks) -> bool:
        """Whether what streams of a turn with thoughts, text and a call is what the package reads of it."""
        asked, turn = _PROBE[1], _PROBE[2] | {"reasoning_content": "r"}
        prompt = self._renderer.render_ids([asked], add_generation_prompt=True)
        sampled = _after(prompt, self._renderer.render_ids([asked, turn]))
        read_turn = self._read_with(())
        whole, streaming = WholeParser(read_turn), AdaptedParser(read_turn, marks, self._tokens.vocabulary)
        whole.feed(sampled)
        whole.finish()
        shown, read = streaming.feed(sampled), whole.message
        return read.content.startswith(shown.content) and (read.reasoning or "").startswith(shown.reasoning)

    def _found_marks(self) -> Marks | None:
        tokens, asked, calling = self._tokens, _PROBE[1], _PROBE[2]
        saying = {"role": "assistant", "content": calling["content"]}
        said, called = (self._renderer.render_ids([asked, turn]) for turn in (saying, calling))
        mark = next((id for id in _after(said, called) if tokens.decode(id).strip()), None)
        bare_calls = bool(self._renderer.parse_response(tokens.encode(_BARE_CALL)).tool_calls)
        think, end = (tokens.convert_tokens_to_ids(token) for token in ("<think>", "</think>"))
        has_begun = tokens.decode(self._prompt).rstrip().endswith("<think>")
        has_marks = bare_calls or mark in tokens.no_text
        if not tokens.is_byte_level or not has_marks or (has_begun and think is None):
            return None
        return Marks(frozenset(self._stops), tokens.no_text, think, end, has_begun, bare_calls)

    def _last_turn(self, prompt_ids: IdSequence) -> list[int]:
        """The end of a prompt, from a turn's end on: no family looks further back to extend it."""
        ids = np.asarray(prompt_ids, np.int32)
        end, width = len(ids) - _WINDOW, _WINDOW
        while end > 0:
            start = max(end - width, 0)
            ends = np.flatnonzero(np.isin(ids[start:end], self._stops))
            if len(ends):
                return _listed(ids[start + ends[-1] :])
            end, width = start, 2 * width
        return _listed(ids)


class _Tokens:
    """A tokenizer file as the package wants tokenizers."""

    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name_or_path = name
        self._tokenizer = tokenizer
        self.no_text = frozenset(self._tokenizer.get_added_tokens_decoder())
        self.is_byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        self.vocabulary = Vocabulary(self._tokenizer)
        self.control_in_text = True

    @property
    def control_in_text(self) -> bool:
        """Whether a control token spelt in a text is that token."""
        return not self._tokenizer.encode_special_tokens

    @control_in_text.setter
    def control_in_text(self, counts: bool) -> None:
        self._tokenizer.encode_special_tokens = not counts
        self._kept = KeptTexts(self._ids_of)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._kept.ids(text)

    def _ids_of(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Any, *args: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def _after(known: list[int], ids: list[int]) -> list[int]:
    """What is left of ids where they are no longer the known ones."""
    shared = next((place for place, id in enumerate(ids) if known[place : place + 1] != [id]), len(ids))
    return ids[shared:]


def _listed(ids: IdSequence) -> list[int]:
    listed: list[int] = np.asarray(ids, np.int32).tolist()
    return listed


THINK, THINK_END = "<think>", "</think>"


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

    def __init__(self, read: Callable[[list[int]], Any]) -> None:
        self._read = read
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
        parsed = self._read(self._ids)
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

    def __init__(self, read: Callable[[list[int]], Any], marks: Marks, vocabulary: Vocabulary) -> None:
        super().__init__(read)
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
