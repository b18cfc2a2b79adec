"""Model families of the PyPI package `renderers` on our interface; the package is an optional extra.

They serve models whose template cannot be rendered turn by turn or shows no calls, and where one is named.
The package parses whole turns: an answer comes in one piece when its turn is over.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from polar.errors import InvalidInput, NotInstalled
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
from polar.rendering.tokenizer import KeptTexts, RawText, Vocabulary, is_byte_level
from polar.rendering.tool_calls import write_call

log = logging.getLogger(__name__)


PACKAGE_FAMILIES = (
    "qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "qwen3-vl", "prime-qwen3", "llama-3", "deepseek-v3",
    "deepseek-r1", "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "gpt-oss", "hy3",
    "inkling", "kimi-k2", "kimi-k2.5", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1",
    "minimax-m2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5",
)  # fmt: skip
"""By the package's names; the first of several that render alike."""
INSTALL = "pip install 'polar-rl[renderers]'"
_HARMONY = "<|channel|>"
"""Without it gpt-oss is not tried, as it first downloads its vocabulary."""


def possible_families(tokens: set[str]) -> Iterator[str]:
    """The package's families that a tokenizer with these added tokens may belong to."""
    return (family for family in PACKAGE_FAMILIES if family != "gpt-oss" or _HARMONY in tokens)


def is_installed() -> bool:
    """Whether the package is installed."""
    return find_spec("renderers") is not None


def adapted_renderer(family: str, tokenizer: Tokenizer, *, keeps_thoughts: bool) -> Renderer:
    """A family of the package for a tokenizer; NotInstalled without the package, InvalidInput where the
    tokenizer is another's, and another error of the package's own where the family needs more."""
    try:
        package: Any = import_module("renderers")
    except ImportError as error:
        what = f"cannot be imported ({error})" if is_installed() else "is not installed"
        raise NotInstalled(f"renderer {family}: the package renderers {what}", hint=INSTALL) from None
    # Some families look their control tokens up as text, so these count in text until all are known.
    tokens = _PackageTokenizer(family, tokenizer)
    try:
        config = package.config_from_name(family)
        renderer = package.create_renderer(tokens, config)
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, _NO_FORM):
            # Each family says in its own way that its control tokens are missing.
            raise InvalidInput(
                f"renderer {family}: the model's tokenizer is not of this family: {said}"
            ) from None
        raise NotInstalled(
            f"renderer {family}: {said}",
            hint="the package renderers could not make it: what it asks for may need a network",
        ) from None
    if keeps_thoughts:
        try:
            renderer = package.create_renderer(tokens, type(config)(thinking_retention="all"))
        except ValueError as error:
            raise InvalidInput(f"engine.history: {family} cannot keep earlier thoughts: {error}") from None
    usual = renderer.render_ids(_PROBE, tools=_PROBE_TOOLS, add_generation_prompt=True)
    tokens.count_control(in_text=False)
    if renderer.render_ids(_PROBE, tools=_PROBE_TOOLS, add_generation_prompt=True) != usual:
        # Some also write them as text; then outside text could spell them too.
        log.warning("%s: its renderer cannot keep control tokens out of messages", family)
        tokens.count_control(in_text=True)
    return AdaptedRenderer(renderer, tokens)


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
"""Errors of the package for messages that a template cannot render."""
_WINDOW = 64
"""Ids before a sampled turn that a family surely looks at, at most back to the end of another turn."""


class AdaptedRenderer(Renderer):
    def __init__(self, renderer: Any, tokens: _PackageTokenizer) -> None:
        self._renderer = renderer
        self._tokens = tokens
        self.raw = RawText(tokens.tokenizer)
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
        fields = [tool_fields(tool) for tool in tools] or None
        return WholeParser(partial(self._renderer.parse_response, tools=fields, prompt_ids=self._prompt))

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


class _PackageTokenizer:
    """A tokenizer file as the package wants tokenizers."""

    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self.name_or_path = name
        self.tokenizer = tokenizer
        self.is_byte_level = is_byte_level(tokenizer)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.count_control(in_text=True)

    def count_control(self, *, in_text: bool) -> None:
        """Set whether control tokens spelled in text are tokens."""
        self.tokenizer.encode_special_tokens = not in_text
        self._kept = KeptTexts(self.tokenizer)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._kept.ids(text)

    def decode(self, token_ids: Any, *args: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self.tokenizer.token_to_id(tokens)
        return [self.tokenizer.token_to_id(token) for token in tokens]


def _listed(ids: IdSequence) -> list[int]:
    listed: list[int] = np.asarray(ids, np.int32).tolist()
    return listed


THINK, THINK_END = "<think>", "</think>"


class WholeParser(ResponseParser):
    """A parser that returns the whole message at the end."""

    def __init__(self, read: Callable[[list[int]], Any]) -> None:
        self._read = read
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        self._ids.extend(ids)
        return MessageDelta()

    def finish(self) -> MessageDelta:
        parsed = self._read(self._ids)
        calls: list[ToolCall] = []
        content: str = (parsed.content or "").strip()
        for call in parsed.tool_calls:
            if call.status == "ok" and call.name:
                calls.append(ToolCall("", call.name, argument_text(call.arguments)))
            else:
                content += call.raw
        return MessageDelta(content, (parsed.reasoning_content or "").strip(), tuple(calls))


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
