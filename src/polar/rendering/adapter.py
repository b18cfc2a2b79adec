"""Model families of the PyPI package `renderers` on our interface; the package is an optional extra."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from polar.models.chat import Message, Role, ToolCall, ToolDefinition
from polar.rendering.base import MessageDelta, Renderer, ResponseParser

log = logging.getLogger(__name__)


def adapted_renderer(model: str, tokenizer_file: Path) -> Renderer | None:
    """The renderer of a model the package knows by its exact name; None if it or the package is absent."""
    try:
        package: Any = import_module("renderers")
        known = import_module("renderers.base").MODEL_RENDERER_MAP
    except ImportError:
        return None
    if model not in known:
        return None
    plain = package.create_renderer(_Tokens(model, tokenizer_file, control_in_text=False))
    usual = package.create_renderer(_Tokens(model, tokenizer_file, control_in_text=True))
    tools = [_tool_fields(ToolDefinition("f", "d", {"type": "object", "properties": {}}))]
    probe = {"messages": _PROBE, "tools": tools, "add_generation_prompt": True}
    if plain.render_ids(**probe) == usual.render_ids(**probe):
        return AdaptedRenderer(plain)
    # Some families write their control tokens as text; then outside text could spell them too.
    log.warning("%s: its renderer cannot keep control tokens out of messages", model)
    return AdaptedRenderer(usual)


_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
_PROBE: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [_CALL]},
    {"role": "tool", "content": "t", "tool_call_id": "c", "name": "f"},
]


class AdaptedRenderer(Renderer):
    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[int]:
        ids: list[int] = self._renderer.render_ids(
            [_message_fields(message) for message in messages],
            tools=[_tool_fields(tool) for tool in tools] or None,
            add_generation_prompt=True,
        )
        return ids

    def bridge(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
    ) -> list[int] | None:
        before = [*prompt_ids, *sampled_ids]
        rendered = self._renderer.bridge_to_next_turn(
            list(prompt_ids), list(sampled_ids), [_message_fields(message) for message in new_messages]
        )
        if rendered is None or rendered.token_ids[: len(before)] != before:
            return None
        ids: list[int] = rendered.token_ids[len(before) :]
        return ids

    def parser(self) -> ResponseParser:
        return _WholeParser(self._renderer)


class _WholeParser(ResponseParser):
    """The package parses whole responses only, so everything becomes certain at the end."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._ids: list[int] = []
        self._message = Message(Role.ASSISTANT)

    def feed(self, ids: Sequence[int]) -> MessageDelta:
        self._ids.extend(ids)
        return MessageDelta()

    def finish(self) -> MessageDelta:
        parsed = self._renderer.parse_response(self._ids)
        calls: list[ToolCall] = []
        content: str = parsed.content or ""
        for call in parsed.tool_calls:
            if call.status == "ok" and call.name:
                calls.append(ToolCall(f"call_{len(calls)}", call.name, _argument_text(call.arguments)))
            else:
                content += call.raw
        self._message = Message(Role.ASSISTANT, content, parsed.reasoning_content, tuple(calls))
        return MessageDelta(content, parsed.reasoning_content or "", tuple(calls))

    @property
    def message(self) -> Message:
        return self._message


class _Tokens:
    """A tokenizer file as the package wants tokenizers."""

    unk_token_id: int | None = None

    def __init__(self, name: str, file: Path, *, control_in_text: bool) -> None:
        self.name_or_path = name
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.encode_special_tokens = not control_in_text
        self.eos_token_id = self._eos(file.with_name("tokenizer_config.json"))

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
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

    def _eos(self, config: Path) -> int | None:
        if not config.is_file():
            return None
        token = json.loads(config.read_text()).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None


def _message_fields(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role.value, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _argument_value(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        fields["name"] = message.name
    return fields


def _tool_fields(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _argument_value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _argument_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
